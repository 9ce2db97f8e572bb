"""A DeepSpeed loop as people write them; prints the median wall time and the processor time of its steps."""

import json
import statistics
import time

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

WARM_UP, STEPS = 20, 150


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    model = AutoModelForCausalLM.from_config(config)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        },
    )
    ids = torch.randint(0, 512, (2, 64))
    seconds: list[float] = []
    cpu = 0.0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            cpu = time.process_time()
        began = time.perf_counter()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - began)
    cpu = (time.process_time() - cpu) / STEPS
    print(json.dumps([statistics.median(seconds[WARM_UP:]), cpu]), flush=True)


if __name__ == "__main__":
    main()

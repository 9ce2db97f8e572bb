"""A plain DeepSpeed loop, as people write them. Prints its losses."""

import sys

import deepspeed
import torch
from leaving import leave  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, LlamaConfig

# It would be compiled for half a minute, and ranks of this size have no use for it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

STEPS, ACCUMULATED = 6, 2


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = AutoModelForCausalLM.from_config(config)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": ACCUMULATED,
            "zero_optimization": {"stage": int(sys.argv[1])},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        },
    )
    losses = []
    for micro in range(STEPS * ACCUMULATED):
        # The last batch is the longest.
        length = 48 if micro == STEPS * ACCUMULATED - 1 else 32
        ids = torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(micro))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        with torch.no_grad():
            engine(input_ids=ids)
    if engine.global_rank == 0:
        sys.stdout.write(f"losses {losses}\n")
        sys.stdout.flush()


main()
leave()

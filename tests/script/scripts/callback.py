"""transformers' Trainer with llmtop's callback, launched by something else than llmtop."""

import sys
from pathlib import Path

import deepspeed
import torch
from leaving import leave  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from llmtop.profiler.probes.callback import LlmtopCallback

# It would be compiled for half a minute, and ranks of this size have no use for it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    zero = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    arguments = TrainingArguments(
        output_dir=str(Path.cwd() / "out"),
        per_device_train_batch_size=2,
        max_steps=4,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        deepspeed=zero if "ds" in sys.argv else None,
    )
    rows = [torch.randint(0, 256, (32,)) for _ in range(32)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    model = AutoModelForCausalLM.from_config(config)
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[LlmtopCallback()]).train()


main()
if "ds" in sys.argv:
    leave()

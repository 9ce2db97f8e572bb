"""transformers' Trainer, with DeepSpeed for an argument `ds` and without it."""

import sys
from pathlib import Path

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

# It would be compiled for half a minute, and ranks of this size have no use for it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
}


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
    rows = [torch.randint(0, 256, (32,), generator=torch.Generator().manual_seed(at)) for at in range(32)]
    arguments = TrainingArguments(
        output_dir=str(Path.cwd() / "out"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=5,
        report_to=[],
        logging_steps=1,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        deepspeed=ZERO if "ds" in sys.argv else None,
    )
    model = AutoModelForCausalLM.from_config(config)
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model=model, args=arguments, train_dataset=data).train()


main()

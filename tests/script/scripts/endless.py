"""Trains until a file is there, or for so many steps: `endless.py FILE STEPS [ds]`. Prints its rates."""

import sys
from pathlib import Path

import torch
from leaving import leave  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, LlamaConfig

FILE, STEPS = Path(sys.argv[1]), int(sys.argv[2])
WITH_ENGINE = "ds" in sys.argv


def model_of_two_layers() -> torch.nn.Module:
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
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def is_over(step: int) -> bool:
    """On all ranks at the same step."""
    over = torch.tensor(float(step >= STEPS or FILE.exists()))
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(over)
    return bool(over)


def plain(model: torch.nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    while not is_over(step):
        ids = torch.randint(0, 256, (2, 32))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1


def with_engine(model: torch.nn.Module) -> None:
    import deepspeed

    # It would be compiled for half a minute, and ranks of this size have no use for it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 1e-6, "warmup_max_lr": 1e-3, "warmup_num_steps": 50},
            },
        },
    )
    rates = []
    step = 0
    while not is_over(step):
        ids = torch.randint(0, 256, (2, 32))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        rates.append(engine.optimizer.param_groups[0]["lr"])
        engine.step()
        step += 1
    if engine.global_rank == 0:
        sys.stdout.write(f"rates {rates[:8]}\n")
        sys.stdout.flush()


if WITH_ENGINE:
    with_engine(model_of_two_layers())
    leave()
else:
    plain(model_of_two_layers())

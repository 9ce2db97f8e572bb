"""The events of a Chrome trace as torch.profiler writes it, as far as they are summarised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct, field

from llmtop.presets.foreign import decode_json

PREFIX = "llmtop:"
"""Of ranges that llmtop itself put into a trace."""
PHASE = f"{PREFIX}phase:"


class Args(Struct, frozen=True, gc=False):
    """What torch and Kineto tell of an event (torch/csrc/profiler, libkineto/src/output_json.cpp)."""

    external_id: int | None = field(default=None, name="External id")
    """Of an operator its own number; of a kernel that of the operator that launched it."""
    sequence: int | None = field(default=None, name="Sequence number")
    """Joins an operator of the forward pass to its node of the backward pass."""
    forward_thread: int | None = field(default=None, name="Fwd thread id")
    input_dims: Any = field(default=None, name="Input Dims")
    input_type: Any = field(default=None, name="Input type")
    collective: str | None = field(default=None, name="Collective name")
    in_elements: int | None = field(default=None, name="In msg nelems")
    out_elements: int | None = field(default=None, name="Out msg nelems")
    dtype: str | None = None
    group_size: int | None = field(default=None, name="Group size")


class TraceEvent(Struct, frozen=True):
    name: str = ""
    ph: str = ""
    cat: str = ""
    tid: Any = None
    ts: float = 0.0
    """Microseconds."""
    dur: float = 0.0
    args: Args = Args()

    @property
    def end(self) -> float:
        return self.ts + self.dur


class Distributed(Struct, frozen=True):
    rank: int = 0
    world_size: int = 1


class TraceFile(Struct, frozen=True):
    """Raises msgspec.MsgspecError where it is cut short."""

    events: list[TraceEvent] = field(name="traceEvents")
    distributed: Distributed = field(default=Distributed(), name="distributedInfo")


def read_trace(path: Path) -> TraceFile:
    return decode_json(path.read_bytes(), TraceFile)

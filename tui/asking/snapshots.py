"""A closer look at a live run, as the app asks for it: what there is to choose, what it costs, the answer."""

from __future__ import annotations

from textual.message import Message

from llmtop.presets.errors import JobFailedError, LlmtopError
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotParams
from llmtop.profiler.snapshots.estimate import check_snapshot, estimate_snapshot
from llmtop.profiler.snapshots.reading import snapshot_lines, taken_for
from llmtop.profiler.units import format_bytes, format_seconds
from llmtop.trainer import control
from llmtop.tui.widgets.dialog import Choice

TRACE_STEPS = 2
WAIT_SECONDS = 600.0

_CHOICES: tuple[tuple[str, str, SnapshotParams], ...] = (
    ("t", f"trace of {TRACE_STEPS} steps", SnapshotParams(what="trace", steps=TRACE_STEPS)),
    ("m", "modules", SnapshotParams(what="modules")),
    ("b", "memory, by block", SnapshotParams(what="state")),
    ("w", "memory, with stacks", SnapshotParams(what="state", with_stacks=True)),
)


class SnapshotAnswered(Message):
    """The ranks have written, or not."""

    def __init__(self, text: str, error: LlmtopError | None = None) -> None:
        super().__init__()
        self.text = text
        self.error = error


def choices(run: RunDir, state: RunState) -> tuple[Choice, ...]:
    """Those that can be taken now, each with its cost; of rank 0. Raises where none can be."""
    found: list[Choice] = []
    refused: LlmtopError | None = None
    spec = run.spec()
    for key, label, params in _CHOICES:
        try:
            check_snapshot(
                run,
                spec,
                params,
                last_step=state.present_step or 0,
                world_size=state.world_size if spec.script else None,
            )
        except LlmtopError as error:
            refused = refused or error
            continue
        cost = estimate_snapshot(spec, params)
        size, stall = format_bytes(cost.kept_bytes), format_seconds(cost.stall_seconds)
        found.append(Choice(key, f"{label}: about {size}, stands still {stall}", key))
    if not found and refused is not None:
        raise refused
    return tuple(found)


def params_of(choice: str) -> SnapshotParams:
    return next(params for key, _, params in _CHOICES if key == choice)


def snapshot(run: RunDir, params: SnapshotParams) -> str:
    """Take it, and wait until it is written: the tables. Raises LlmtopError where there is none."""
    request_id = control.snapshot(run, params)
    settled = control.wait_until_settled(run, request_id, WAIT_SECONDS)
    if settled is None or settled.answer != "done":
        why = settled.reason if settled is not None else "the ranks have not written it yet"
        raise JobFailedError("no snapshot was taken", why=why)
    taken = taken_for(read_state(run), request_id)
    return "\n".join(line for event in taken for line in snapshot_lines(run, event))

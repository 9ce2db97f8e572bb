"""What the screens show, as immutable values: made in a thread by `tui.feeds.feed`, painted by the panels."""

from __future__ import annotations

from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.breakdown import Breakdown
from llmtop.profiler.findings.find import Finding
from llmtop.profiler.fold.rankstate import WARMUP_STEPS
from llmtop.profiler.fold.runstate import RunState, Status
from llmtop.profiler.fold.series import Series, mean_rate, steady_steps
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.remote import Remote


class RunView(Struct, frozen=True, kw_only=True):
    """Everything that the monitor knows of one run at one time."""

    state: RunState
    spec: RunSpec
    prediction: Prediction
    breakdown: Breakdown
    findings: tuple[Finding, ...] = ()
    reading: bool = False
    """Its record goes on from here: a long one is shown while it is read."""
    remote: Remote | None = None
    """Of a run on another machine: how the connection to it is."""
    short_id: str = ""
    """What commands take for the run, among those that there were when it was opened; empty: its whole id."""


def steady_speed(series: Series) -> float | None:
    """Tokens per second over all steps after warm-up; None before that."""
    return mean_rate(steady_steps(series, WARMUP_STEPS))


class LogText(Struct, frozen=True, kw_only=True):
    """The newest lines of one log of a run, made harmless."""

    source: str
    """`rank 0` or `supervisor`."""
    lines: tuple[str, ...] = ()
    total_lines: int = 0
    """Lines read so far; more than are kept when the log is long."""


class RunRow(Struct, frozen=True, kw_only=True):
    """One line of the table of runs. None: not known."""

    run_id: str
    short_id: str = ""
    """What commands take for it among all that are listed; empty where it is not listed."""
    name: str
    status: Status
    model: str = ""
    device: str = ""
    step: int | None = None
    """At which it stands; not known while it goes on and has not told from where."""
    steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: int | None = None
    """Peak on one device; on the CPU kind of one rank's process."""
    started: float | None = None
    """Wall clock."""
    problem: str = ""
    """Why the run cannot be read; empty when it can."""
    unsaved: bool = False
    """The newest checkpoint that was asked for could not be written."""


STATUS_MARKS: dict[Status, tuple[str, str, str]] = {
    "starting": ("◌", "starting", "accent"),
    "running": ("●", "running", "success"),
    "stopping": ("◐", "stopping", "warning"),
    "completed": ("✓", "completed", "success"),
    "stopped": ("■", "stopped", "warning"),
    "gone": ("?", "gone", "warning"),
    "failed": ("✗", "failed", "error"),
    "out_of_memory": ("✗", "out of memory", "error"),
    "lost": ("?", "lost", "error"),
    "exported": ("…", "exported", "accent"),
}
"""Status to its mark, its word, and the colour of the theme that goes with it."""

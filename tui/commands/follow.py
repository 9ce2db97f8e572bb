"""Follow a run without the app: one line on stderr for each thing worth telling, until the run ends."""

from __future__ import annotations

import time
from collections.abc import Iterator

from llmtop.presets.errors import ExitCode, JobFailedError, OutOfMemoryError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.changewords import outcome, title
from llmtop.profiler.cost.nvme import nvme_words
from llmtop.profiler.findings.startup import stage_hint
from llmtop.profiler.fleet.part import part_in_lines
from llmtop.profiler.fold.ending import ending, not_saved_words, unsaved_words
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.failureevents import HostMemoryRunsOut
from llmtop.profiler.record.feed import RunReader
from llmtop.profiler.record.remote import command_here, name_here
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.units import format_progress, format_seconds
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.follow_hosts import HostNarrator, LinkNarrator

POLL_SECONDS = 0.25
LINES_PER_RUN = 20
"""A progress line after each of this many equal parts of the run, and after the first step."""
QUIET_SECONDS = 10.0
"""A progress line at least this often while steps go on."""

_MEMORY_WORDS = {
    "warned": "",
    "save_asked": ": a checkpoint is made after this step",
    "no_room": ": there is no room for a checkpoint",
}


class Narrator:
    """Says what changed between two states of a run; remembers only what it has said."""

    def __init__(self, spec: RunSpec, prediction: Prediction | None = None) -> None:
        self._spec = spec
        self._prediction = prediction
        self._planned = spec.steps_planned
        self._every = max(1, (self._planned or spec.options.steps) // LINES_PER_RUN)
        self._said_step = 0
        self._said_time = 0.0
        self._stage = ""
        self._hint = ""
        self._compiling: str | None = None
        self._hanging = False
        self._unwritable = ""
        self._memory: HostMemoryRunsOut | None = None
        self._nvme_told = False
        self._refused = 0
        """How many refused checkpoints were told."""
        self._changes: dict[int, str] = {}
        """What was last said of each change."""

    def lines(self, state: RunState, now: float) -> Iterator[str]:
        """Lines for `state`; `now` is monotonic."""
        yield from self._start_up(state, now)
        yield from self._trouble(state)
        yield from self._changed(state)
        for refused in state.checkpoints_refused[self._refused :]:
            yield f"step {refused.step:,}: the checkpoint is refused: {refused.why}"
        self._refused = len(state.checkpoints_refused)
        step = 0 if state.made_no_step else state.steps_finished
        if step < self._said_step:
            self._said_step = 0  # it was gone on with, from an earlier one
        due = step - self._said_step >= self._every or now - self._said_time >= QUIET_SECONDS
        if step > self._said_step and (self._said_step == 0 or due or step == self._planned):
            self._said_step, self._said_time = step, now
            yield self._progress(state)

    def _start_up(self, state: RunState, now: float) -> Iterator[str]:
        if state.nvme is not None and not self._nvme_told:
            self._nvme_told = True
            yield nvme_words(state.nvme)
        rank = state.first
        if rank is None or not rank.stages or not state.is_beginning:
            return
        stage = rank.stages[-1].stage
        if stage != self._stage:
            self._stage, self._said_time = stage, now
            yield f"starting: {stage.replace('_', ' ')}"
        elif now - self._said_time >= QUIET_SECONDS:
            self._said_time = now
            hint = stage_hint(state, self._spec, self._prediction, stage)
            if hint and hint != self._hint:
                self._hint = hint
                yield f"  {hint}"

    def _trouble(self, state: RunState) -> Iterator[str]:
        if state.compiling != self._compiling:
            self._compiling = state.compiling
            if state.compiling is not None:
                yield f"compiling {state.compiling}: minutes the first time, cached afterwards"
        memory = state.memory_runs_out
        if memory is not None and memory != self._memory:
            self._memory = memory
            yield f"host memory full in {format_seconds(memory.seconds)}{_MEMORY_WORDS[memory.action]}"
        if state.unwritable != self._unwritable:
            self._unwritable = state.unwritable
            yield (
                f"nothing is recorded: {state.unwritable}; the training goes on"
                if state.unwritable
                else "there is room again: what happened meanwhile is recorded"
            )
        hanging = state.hang_seconds is not None
        if hanging and not self._hanging:
            yield f"no step for {format_seconds(state.hang_seconds)}: the run may hang"
        self._hanging = hanging

    def _changed(self, state: RunState) -> Iterator[str]:
        for at, record in enumerate(state.changes.records):
            if self._changes.get(at) != (told := outcome(record)):
                self._changes[at] = told
                yield f"change: {title(record)}: {told}"

    def _progress(self, state: RunState) -> str:
        series = state.series
        loss = "n/a" if state.present_loss is None else f"{state.present_loss:.4f}"
        seconds = series.step_seconds[-1] if series.step_seconds else None
        rate = series.tokens_per_second[-1] if series.tokens_per_second else None
        # A script whose batches are no tokens never has a rate.
        rate_text = "" if rate is None else f"  {rate:,.0f} tokens/s"
        return (
            f"step {format_progress(state.steps_finished, self._planned)}  loss {loss}"
            f"  {format_seconds(seconds)} a step{rate_text}"
        )


def follow(run: RunDir) -> RunState:
    """Tell the run's progress on stderr until it ends; its last state. Ctrl-C leaves the run going."""
    reader, narrator = RunReader(part_in_lines(run)), Narrator(run.spec(), run.prediction())
    hosts, link = HostNarrator(run), LinkNarrator(run)
    try:
        while True:
            state = reader.poll()
            for line in (*link.lines(), *hosts.lines()):
                tell(line)
            for line in narrator.lines(state, time.monotonic()):
                tell(line)
            if state.status in ENDED:
                return state
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        name = name_here(run.path)
        tell(f"the run goes on: llmtop attach {name}, llmtop stop {name}")
        raise


def end_in_words(state: RunState) -> str:
    """How a run ended, in one sentence."""
    reason = ending(state).reason
    if state.status == "exported":
        return reason
    return f"{state.status.replace('_', ' ')}: {reason}" if reason else state.status


def require_success(run: RunDir, state: RunState) -> ExitCode:
    """DONE for a run that ended well, with a warning where a stopped one is not saved.

    Raises what the command ends with otherwise: also for a run that has trained to its end and is not saved,
    for who waits for it in a script goes on with what it wrote.
    """
    unsaved = unsaved_words(state)
    if state.status == "completed" and unsaved:
        raise JobFailedError(
            f"run {run.run_id} has trained to its end and is not saved",
            why=unsaved,
            fix=f"make room, then {_again(run, state)}",
        )
    if state.status in ("completed", "stopped", "gone", "exported"):
        tell_unsaved(run, state)
        return ExitCode.DONE
    error = OutOfMemoryError if state.status == "out_of_memory" else JobFailedError
    fix = ending(state).fix or f"llmtop logs {name_here(run.path)}"
    not_saved = unsaved or not_saved_words(state, run.spec(state.changes.setting))
    lost = f"; {not_saved}" if not_saved else ""
    raise error(f"run {run.run_id} {end_in_words(state)}{lost}", fix=fix)


def tell_unsaved(run: RunDir, state: RunState) -> None:
    """What an ended run has made after its newest checkpoint, and why that is not saved."""
    if unsaved := unsaved_words(state):
        tell(f"warning: {unsaved}")
    elif not_saved := not_saved_words(state, run.spec(state.changes.setting)):
        tell(f"warning: {not_saved}" if state.checkpoints else not_saved)


def _again(run: RunDir, state: RunState) -> str:
    """What brings the steps back that are nowhere saved."""
    if not state.checkpoints or state.imported:
        return "run it again"
    return f"{command_here(run.path, 'resume')} goes on from step {state.checkpoints[-1].step:,}"

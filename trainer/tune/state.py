"""A search as its folder tells it: folded from the journal's lines, for whoever looks on."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.feed import RunReader
from llmtop.profiler.record.rundir import list_runs
from llmtop.trainer.tune.journal import Line, TuneDir, decode_lines
from llmtop.trainer.tune.pool import fastest, pooled


class SearchState(Struct, frozen=True, kw_only=True):
    """How far a search is."""

    ended: tuple[Line, ...] = ()
    """Trials that are over, in the order of their ends."""
    running: Line | None = None
    """The trial that has begun and not ended."""
    going: bool = False
    """Whether a process is at it."""
    run: RunState | None = None
    """Of the trial that goes on, as far as its own record goes."""

    @property
    def settings(self) -> list[Line]:
        """One line for each setting that was tried, the fastest first, then those without a time."""
        lines = pooled(self.ended)
        return [*fastest(lines), *(line for line in lines if not line.step_seconds)]

    @property
    def best(self) -> Line | None:
        return next((line for line in self.settings if line.step_seconds), None)


def fold_lines(state: SearchState, lines: Sequence[Line]) -> SearchState:
    """The state after some more lines."""
    for line in lines:
        if line.event == "began":
            state = replace(state, running=line)
        elif line.event == "ended":
            state = replace(state, ended=(*state.ended, line), running=None)
        else:
            state = replace(state, running=None)
    return state


class TuneReader:
    """Reads what the journal has gained; `poll` gives the state as it is now."""

    def __init__(self, tune: TuneDir) -> None:
        self._tune = tune
        self._offset = 0
        self._state = SearchState()
        self._watched: RunReader | None = None

    def poll(self) -> SearchState:
        # Asked before reading: a search that ends in between has then written its last line.
        going = self._tune.holder() is not None
        self._state = replace(fold_lines(self._state, self._new_lines()), going=going)
        run = self._run() if going and self._state.running is not None else None
        self._state = replace(self._state, run=run)
        return self._state

    def _new_lines(self) -> list[Line]:
        try:
            with self._tune.journal_path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return []  # not begun, or gone: what was read stays
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return decode_lines(whole)

    def _run(self) -> RunState | None:
        """The newest run is that of the trial which goes on."""
        newest = next(iter(list_runs(self._tune.trials_root)), None)
        known = {line.run for line in self._state.ended}
        if newest is None or newest.run_id in known:
            return None
        if self._watched is None or self._watched.run.run_id != newest.run_id:
            self._watched = RunReader(newest)
        return self._watched.poll()

"""The table of runs, read from their folders; without the toolkit, which takes longer to load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.breakdown import process_peaks
from llmtop.profiler.fleet.part import telling_part
from llmtop.profiler.fold.modelname import model_name
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.gpuwords import NO_ANSWER
from llmtop.profiler.record.feed import RunReader
from llmtop.profiler.record.naming import short_ids
from llmtop.profiler.record.rundir import RunDir, list_runs
from llmtop.tui.feeds.leftrun import LeftRun
from llmtop.tui.feeds.view import RunRow, steady_speed

_ROWS_A_BATCH = 16
_BYTES_A_BATCH = 16 << 20
"""To be read: a few tenths of a second."""


class RunsFeed:
    """The table of runs; a run that has ended is read once, and again when it goes on."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rows: dict[str, RunRow] = {}
        self._readers: dict[str, RunReader] = {}
        self._left: dict[str, LeftRun] = {}
        self._anew = False
        self.total = 0
        """How many runs the newest scan has found; it gives fewer while it has not read them all."""
        self._short_ids: dict[str, str] = {}

    def read_anew(self) -> None:
        """The next scan takes nothing for known. Any thread may call."""
        self._anew = True

    def scan(self) -> Iterator[tuple[RunRow, ...]]:
        """Read what has changed, newest run first; long lists come in growing parts."""
        runs = list_runs(self._root)
        self.total = len(runs)
        for gone in self._rows.keys() - {run.run_id for run in runs}:
            del self._rows[gone]
            self._readers.pop(gone, None)
            self._left.pop(gone, None)
        if self._anew:
            self._anew = False
            self._readers.clear()
            self._left.clear()
        fresh, batch = 0, _ROWS_A_BATCH
        spent_bytes, batch_bytes = 0, _BYTES_A_BATCH
        for run in runs:
            known, left = self._rows.get(run.run_id), self._left.get(run.run_id)
            if left is not None and not left.goes_on():
                continue
            spent_bytes += self._read(run)
            fresh += known is None
            if fresh >= batch or spent_bytes > batch_bytes:
                # Each part is painted anew: parts that grow keep a long list linear.
                fresh, batch = 0, batch * 2
                spent_bytes, batch_bytes = 0, batch_bytes * 2
                yield self._listed(runs)
        yield self._listed(runs)

    def first(self, most_runs: int, most_bytes: int) -> tuple[RunRow, ...]:
        """All runs, read for the first time; none where there are more, or more bytes to be read of them.

        Of those the next scan reads what is left.
        """
        runs, left_bytes = list_runs(self._root), most_bytes
        if len(runs) > most_runs:
            return ()
        for run in runs:
            left_bytes -= self._begin(run, left_bytes)
            if left_bytes < 0:
                return ()
            self._read(run)
        return self._listed(runs)

    def _begin(self, run: RunDir, most_bytes: int) -> int:
        """Read one run up to about so many bytes; how many they were: none that a bookmark stands for."""
        try:
            reader = RunReader(telling_part(run), looks_for_left=False)
            self._readers[run.run_id] = reader
            return reader.poll_within(most_bytes)
        except LlmtopError:
            return 0  # whoever reads all of it tells why not

    def _listed(self, runs: tuple[RunDir, ...]) -> tuple[RunRow, ...]:
        if self._short_ids.keys() != {run.run_id for run in runs}:
            self._short_ids = short_ids([run.run_id for run in runs])
        listed = []
        for run in runs:
            row, short = self._rows.get(run.run_id), self._short_ids[run.run_id]
            if row is not None and row.short_id != short:
                row = self._rows[run.run_id] = replace(row, short_id=short)
            if row is not None:
                listed.append(row)
        return tuple(listed)

    def _read(self, run: RunDir) -> int:
        """All that is new of a run; how many bytes that was."""
        spent_bytes = 0
        left = LeftRun(run)  # before it is read: what comes meanwhile is news at the next look
        try:
            reader = self._readers.get(run.run_id) or RunReader(telling_part(run), looks_for_left=False)
            before_bytes = reader.read_bytes
            row = run_row(run, reader.poll())
            spent_bytes = max(0, reader.read_bytes - before_bytes)
        except LlmtopError as error:
            row = RunRow(run_id=run.run_id, name=run.run_id, status="lost", problem=error.what)
        self._rows[run.run_id] = row
        if row.status in ENDED:
            self._readers.pop(run.run_id, None)
            self._left[run.run_id] = left
        else:
            self._readers[run.run_id] = reader
            self._left.pop(run.run_id, None)
        return spent_bytes


def run_row(run: RunDir, state: RunState) -> RunRow:
    """One line of the table."""
    spec = run.spec()
    held = process_peaks(state, spec) if spec.on_cpu else state.peak_device_bytes
    return RunRow(
        run_id=run.run_id,
        name=spec.name,
        model=model_name(spec, state),
        device=f"{spec.world_size}x{spec.gpu.name}" if spec.knows("gpu") else NO_ANSWER,
        status=state.status,
        step=state.present_step,
        steps=spec.steps_planned,
        loss=state.present_loss,
        tokens_per_second=steady_speed(state.speed_series),
        memory_bytes=max(held.values(), default=None),
        started=state.started if state.started is not None else run.created(),
        unsaved=state.unsaved is not None,
    )

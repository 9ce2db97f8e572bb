"""The steps of one rank, added to what is known of it: the part of the fold that long runs live in."""

from __future__ import annotations

from msgspec.structs import replace

from llmtop.profiler.fold.pace import PaceBuilder
from llmtop.profiler.fold.rankstate import WARMUP_STEPS, PhaseTotal, RankState
from llmtop.profiler.record.stepevents import LeftOutSteps, PhaseMemory, StepFinished

_Peaks = dict[str, list[int]]
"""Phase to the largest allocated, peak and reserved bytes; -1 where nothing was read."""


class StepFolder:
    """Mutable while a batch of events is folded; `freeze` gives the rank as it is then."""

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self._last: StepFinished | None = None
        self._phases = rank.phase_seconds
        self._seen = rank.steps_seen
        self._peaks = _opened(rank.peaks)
        self._in_use = _opened(rank.peaks_in_use)
        self._seconds = {phase: total.seconds for phase, total in rank.phase_totals.items()}
        self._counts = {phase: total.steps for phase, total in rank.phase_totals.items()}
        self._untold = rank.untold_steps
        self._step_seconds, self._steps = rank.step_total.seconds, rank.step_total.steps
        self._pace = PaceBuilder(rank.alone)

    def add(self, event: StepFinished) -> None:
        if event.left_out is not None:
            self._add_left_out(event.left_out, event.step)
        self._last = event
        self._phases = event.phase_seconds or self._phases
        _raise(self._peaks, event.phase_memory)
        if not event.profiled:
            # The record of kernels takes memory and time of its own.
            if event.in_use_only:
                _raise(self._in_use, event.phase_memory)
            if self._seen >= WARMUP_STEPS:
                self._add_times(event)
        self._seen += 1

    def _add_left_out(self, left_out: LeftOutSteps, next_step: int) -> None:
        """None of them was profiled, and none warmed up."""
        _raise(self._peaks, left_out.peaks)
        _raise(self._in_use, left_out.peaks_in_use)
        for phase, (seconds, steps) in left_out.phase_seconds.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
            self._counts[phase] = self._counts.get(phase, 0) + steps
        told = max((steps for _, steps in left_out.phase_seconds.values()), default=0)
        self._untold += max(0, left_out.steps - told)
        self._pace.add_left_out(left_out, next_step)
        self._seen += left_out.steps

    def _add_times(self, event: StepFinished) -> None:
        sums, counts, is_told = self._seconds, self._counts, False
        for phase, seconds in event.phase_seconds.items():
            if seconds is not None:
                sums[phase] = sums.get(phase, 0.0) + seconds
                counts[phase] = counts.get(phase, 0) + 1
                is_told = True
        self._untold += not is_told
        self._step_seconds += event.step_seconds
        self._steps += 1
        self._pace.add(event)

    def freeze(self) -> RankState:
        return replace(
            self._rank,
            last_step=self._last if self._last is not None else self._rank.last_step,
            phase_seconds=self._phases,
            steps_seen=self._seen,
            peaks=_closed(self._peaks),
            peaks_in_use=_closed(self._in_use),
            phase_totals={
                phase: PhaseTotal(seconds=seconds, steps=self._counts[phase])
                for phase, seconds in self._seconds.items()
            },
            untold_steps=self._untold,
            step_total=PhaseTotal(seconds=self._step_seconds, steps=self._steps),
            alone=self._pace.freeze(),
        )


def _opened(peaks: dict[str, PhaseMemory]) -> _Peaks:
    return {phase: _readings(memory) for phase, memory in peaks.items()}


def _readings(memory: PhaseMemory) -> list[int]:
    read = (memory.allocated_bytes, memory.peak_bytes, memory.reserved_bytes)
    return [-1 if value is None else value for value in read]


def _closed(peaks: _Peaks) -> dict[str, PhaseMemory]:
    return {
        phase: PhaseMemory(
            allocated_bytes=_known(allocated), peak_bytes=_known(peak), reserved_bytes=_known(reserved)
        )
        for phase, (allocated, peak, reserved) in peaks.items()
    }


def _known(value: int) -> int | None:
    return None if value < 0 else value


def _raise(peaks: _Peaks, read: dict[str, PhaseMemory]) -> None:
    for phase, memory in read.items():
        known = peaks.get(phase)
        if known is None:
            peaks[phase] = _readings(memory)
            continue
        allocated, peak, reserved = memory.allocated_bytes, memory.peak_bytes, memory.reserved_bytes
        if allocated is not None and allocated > known[0]:
            known[0] = allocated
        if peak is not None and peak > known[1]:
            known[1] = peak
        if reserved is not None and reserved > known[2]:
            known[2] = reserved

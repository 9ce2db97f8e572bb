"""The steps of one rank, added to what is known of it: the part of the fold that long runs live in."""

from __future__ import annotations

from msgspec.structs import replace

from llmtop.profiler.events import PhaseMemory, StepFinished
from llmtop.profiler.pace import PaceBuilder
from llmtop.profiler.rankstate import WARMUP_STEPS, PhaseTotal, RankState

_Peaks = dict[str, tuple[int | None, int | None, int | None]]
"""Phase to the largest allocated, peak and reserved bytes."""


class StepFolder:
    """Mutable while a batch of events is folded; `freeze` gives the rank as it is then."""

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self._last: StepFinished | None = None
        self._seen = rank.steps_seen
        self._peaks = _opened(rank.peaks)
        self._in_use = _opened(rank.peaks_in_use)
        self._totals = {phase: (total.seconds, total.steps) for phase, total in rank.phase_totals.items()}
        self._pace = PaceBuilder(rank.alone)

    def add(self, event: StepFinished) -> None:
        self._last = event
        _raise(self._peaks, event)
        if not event.profiled:
            # The record of kernels takes memory and time of its own.
            if event.in_use_only:
                _raise(self._in_use, event)
            if self._seen >= WARMUP_STEPS:
                self._add_times(event)
        self._seen += 1

    def _add_times(self, event: StepFinished) -> None:
        totals = self._totals
        for phase, seconds in event.phase_seconds.items():
            if seconds is not None:
                so_far, steps = totals.get(phase, (0.0, 0))
                totals[phase] = so_far + seconds, steps + 1
        self._pace.add(event)

    def freeze(self) -> RankState:
        return replace(
            self._rank,
            last_step=self._last if self._last is not None else self._rank.last_step,
            steps_seen=self._seen,
            peaks=_closed(self._peaks),
            peaks_in_use=_closed(self._in_use),
            phase_totals={
                phase: PhaseTotal(seconds=seconds, steps=steps)
                for phase, (seconds, steps) in self._totals.items()
            },
            alone=self._pace.freeze(),
        )


def _opened(peaks: dict[str, PhaseMemory]) -> _Peaks:
    return {
        phase: (memory.allocated_bytes, memory.peak_bytes, memory.reserved_bytes)
        for phase, memory in peaks.items()
    }


def _closed(peaks: _Peaks) -> dict[str, PhaseMemory]:
    return {
        phase: PhaseMemory(allocated_bytes=allocated, peak_bytes=peak, reserved_bytes=reserved)
        for phase, (allocated, peak, reserved) in peaks.items()
    }


def _raise(peaks: _Peaks, event: StepFinished) -> None:
    for phase, memory in event.phase_memory.items():
        new = (memory.allocated_bytes, memory.peak_bytes, memory.reserved_bytes)
        old = peaks.get(phase)
        if old is None:
            peaks[phase] = new
        elif new != old:
            first, second, third = old
            allocated, peak, reserved = new
            peaks[phase] = (
                first if allocated is None or (first is not None and first >= allocated) else allocated,
                second if peak is None or (second is not None and second >= peak) else peak,
                third if reserved is None or (third is not None and third >= reserved) else reserved,
            )

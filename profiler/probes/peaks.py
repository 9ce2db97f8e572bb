"""Explains the peaks of a step's phases: the allocator's trace of the step, with names from a watch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from llmtop.profiler.memory.result import Component
from llmtop.profiler.probes.allocator import AllocatorCounters
from llmtop.profiler.probes.peaktrace import (
    PhasePeak,
    Replay,
    Span,
    TransientSizes,
    in_trace_time,
    phase_peak,
)
from llmtop.profiler.probes.stepwatch import StepWatch, now_us
from llmtop.profiler.probes.tracer import Tracer
from llmtop.profiler.record.events import PeakClassified, Phase

GROWN = 1.001
"""A later sampled step is traced only if the peak has grown by so much since the last trace: the same peak
has the same parts, and reading a trace costs tens of milliseconds."""
_LARGEST_UNNAMED = 8
_WORKSPACE_BYTES = frozenset({4096 * 8 * 1024, 4096 * 1024 * 2 + 16 * 1024 * 8})
"""cuBLAS workspaces: from Hopper on, and before (torch `aten/src/ATen/cuda/CublasHandlePool.cpp`)."""


class PeakProbe:
    """One trace at a time: `begin`, `end_phase` after each phase, `finish` or `abandon`."""

    def __init__(
        self,
        module: torch.nn.Module,
        tracer: Tracer,
        *,
        device: torch.device,
        vocab_size: int,
        hidden_size: int | None,
        emit: Callable[[PeakClassified], None],
        buffers: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        self.watch = StepWatch(module, device, vocab_size, buffers)
        self._tracer = tracer
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._emit = emit
        self._traced_peak = 0
        self.last_step = 0
        self._spans: list[tuple[Span, AllocatorCounters]] = []
        self._first_event = 0
        self._border = 0
        self._border_us = 0
        self.active = False

    def is_due(self, highest_so_far: int) -> bool:
        """Whether a sampled step is worth a trace, by the largest peak of any phase so far."""
        return self._traced_peak == 0 or highest_so_far > GROWN * self._traced_peak

    def begin(self, step: int) -> None:
        self.last_step, self._spans = step, []
        self.active = True
        self.watch.attach()
        self._tracer.start()
        self._first_event = self._tracer.counters().events
        self._border, self._border_us = 0, now_us()

    def end_phase(self, phase: Phase) -> None:
        """Before the allocator's peaks are set back."""
        counters, now = self._tracer.counters(), now_us()
        border = counters.events - self._first_event
        span = Span(phase=phase, first=self._border, last=border, began_us=self._border_us, ended_us=now)
        self._spans.append((span, counters))
        self._border, self._border_us = border, now

    def finish(self) -> None:
        """Replay the step and say what its peaks held."""
        self.watch.detach()
        replay = Replay(self._tracer.stop())
        shift = replay.clock_shift_us([span for span, _ in self._spans])
        seen = in_trace_time(self.watch.seen, shift)
        sizes = self._sizes()
        for span, counters in self._spans:
            self._traced_peak = max(self._traced_peak, counters.allocated_peak_bytes)
            if span.phase != "data":
                self._emit(self._event(phase_peak(replay, span, seen, sizes), counters))
        self.active = False
        self._forget()

    def abandon(self) -> None:
        """After a failure: nothing may go on being recorded or hooked."""
        if self.active:
            self.active = False
            self.watch.detach()
            self._tracer.abandon()
        self._forget()

    def _forget(self) -> None:
        self._spans = []
        self.watch.seen = []

    def _event(self, peak: PhasePeak, counters: AllocatorCounters) -> PeakClassified:
        total = counters.allocated_peak_bytes
        components = dict(peak.components)
        # The two peaks may be of two states, for blocks are rounded. But at its own the allocator's total is
        # no less than at the replay's, where it is no less than what was asked for.
        components[Component.ROUNDING] = max(0, total - peak.requested_bytes)
        return PeakClassified(
            step=self.last_step,
            phase=peak.phase,
            moment=peak.moment,
            components={str(name): size for name, size in components.items() if size},
            total_bytes=total,
            unnamed_bytes=total - sum(components.values()),
            largest_unnamed=peak.unnamed[:_LARGEST_UNNAMED],
            replay_error_bytes=counters.requested_peak_bytes - peak.active_peak_bytes,
        )

    def _sizes(self) -> TransientSizes:
        return TransientSizes(
            logits=logits_sizes(self.watch.batch_shape, self._vocab_size, self._hidden_size),
            workspaces=_WORKSPACE_BYTES,
        )


def logits_sizes(batch_shape: tuple[int, ...], vocab_size: int, hidden_size: int | None) -> frozenset[int]:
    """Bytes of whole and of shifted logits and of Liger's chunks of them, in 16 and in 32 bits."""
    if len(batch_shape) != 2:
        return frozenset()
    tokens = batch_shape[0] * batch_shape[1]
    rows = {tokens, tokens - batch_shape[0]}
    if hidden_size:
        # liger-kernel 0.8.5, `ops/fused_linear_cross_entropy.py`: tokens / ceil(vocabulary / hidden),
        # up to a power of two; the last chunk may be shorter.
        for whole in tuple(rows):
            per_chunk = -(-whole // -(-vocab_size // hidden_size))
            chunk = min(whole, 1 << max(0, per_chunk - 1).bit_length())
            rows |= {chunk, whole % chunk or chunk}
    return frozenset(count * vocab_size * width for count in rows for width in (2, 4))


def hidden_size_of(module: Any) -> int | None:
    config = getattr(module, "config", None)
    size = getattr(config, "hidden_size", None)
    return size if isinstance(size, int) else None

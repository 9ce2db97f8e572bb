"""The probes of one training process, as the loop uses them: a step, its phases, its readings.

A probe that fails says so in the log and stays off; it never stops the training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from msgspec import Struct

from llmtop.profiler.effects.kernelnames import recognise
from llmtop.profiler.memory.result import Component, Moment
from llmtop.profiler.probes.activations import ActivationCounter
from llmtop.profiler.probes.allocator import Peaks, memory_meter, merge
from llmtop.profiler.probes.classify import buffer_tensors, classify
from llmtop.profiler.probes.heap import read_heap
from llmtop.profiler.probes.kernels import KernelRecorder
from llmtop.profiler.probes.outside import OutsideProbe
from llmtop.profiler.probes.peaks import PeakProbe, hidden_size_of
from llmtop.profiler.probes.phases import StepTimes, phase_timer
from llmtop.profiler.probes.tracer import CudaTracer, Tracer
from llmtop.profiler.record.events import AnyEvent, MemoryClassified, OutsideMoment, Phase, PhaseMemory

logger = logging.getLogger(__name__)

_ALWAYS_CLASSIFIED = (1, 2)
_OUTSIDE_AFTER: dict[int, OutsideMoment] = {1: "first_step", 2: "second_step"}
"""Steps since this process began: kernels are loaded when they are first used."""


def is_classified(step: int, every: int) -> bool:
    """Whether a step's tensors are counted: in the first two steps and every so many."""
    return step in _ALWAYS_CLASSIFIED or (every > 0 and step % every == 0)


class StepReading(Struct, frozen=True, kw_only=True):
    """What the probes saw of one step. `times` is to be read when the device has got there."""

    times: StepTimes | None
    phase_memory: dict[str, PhaseMemory]
    profiled: bool = False
    """Kernels were recorded: the times are not those of a step."""


class TrainingProbes:
    """Attach to an engine, then wrap each step and phase of the loop."""

    def __init__(
        self,
        engine: Any,
        *,
        device: torch.device,
        vocab_size: int,
        classify_every: int,
        heap_free_before_bytes: int = 0,
        kernel_step: int | None = None,
        records_kernels: bool = False,
        outside: OutsideProbe | None = None,
        tracer: Tracer | None = None,
        emit: Callable[[AnyEvent], None],
    ) -> None:
        """In `kernel_step` the rank that `records_kernels` names what runs; the other ranks wait for it.

        `tracer` is the record of the device's allocator; on CUDA there always is one.
        """
        self._engine = engine
        self._on_cpu = device.type == "cpu"
        self._emit = emit
        self._classify_every = classify_every
        self._timer = phase_timer(device)
        self._memory = memory_meter(device)
        self._activations = ActivationCounter(engine.module, vocab_size)
        # What the heap kept free before the model existed is part of the runtime's baseline.
        self._heap_free_before = heap_free_before_bytes
        self._kernels = KernelRecorder(device)
        self._kernel_step = kernel_step
        self._records_kernels = records_kernels
        self._outside = outside
        if tracer is None and device.type == "cuda":
            tracer = CudaTracer(device)
        self._peaks = None if tracer is None else self._peak_probe(tracer, device, vocab_size)
        self._highest_phase_peak = 0
        """The allocator's, of any phase so far: what start-up reached is not a peak of training."""
        self._steps = 0
        self._broken: set[str] = set()
        self._step = 0
        self._asked_step: int | None = None
        """The last step that a trace was considered for."""
        self._changed = False
        self._changed_step: int | None = None
        self._phase_memory: dict[str, PhaseMemory] = {}
        self._inside_step: MemoryClassified | None = None
        self._optimizer_hook = self._watch_optimizer_step()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        self._step = step
        if self._changed:
            self._changed, self._changed_step = False, step
        self._phase_memory = {}
        self._inside_step = None
        self._guarded("memory", self._memory.start_step)
        self._guarded("times", self._timer.start_step)
        # A step that fails leaves its recording on: to end it waits for the device, which may never come.
        yield

    @contextmanager
    def phase(self, phase: Phase, *, last: bool) -> Iterator[None]:
        """One phase of one micro-batch; `last` marks the micro-batch that ends with the optimizer step."""
        sampled = last and self.sampled
        if last and phase == "forward" and self._records_kernels and self._step == self._kernel_step:
            self._guarded("kernels", self._kernels.start)
        if sampled:
            self._guarded("peak", self._begin_trace)
        self._guarded("memory", self._memory.start_phase)
        self._guarded("times", lambda: self._timer.start(phase))
        with self._watching(phase) if sampled else nullcontext():
            yield
        self._guarded("times", lambda: self._timer.stop(phase))
        if self._tracing is not None:
            self._guarded("peak", lambda: self._end_traced_phase(phase))
        self._guarded("memory", lambda: self._keep_memory(phase))
        if sampled:
            self._guarded("classification", lambda: self._classify_after(phase))
        if phase == "optimizer" and self._kernels.running:
            self._guarded("kernels", self._tell_kernels)

    def finish_step(self) -> StepReading:
        """Call at the end of a step, after its last phase."""
        times: list[StepTimes] = []
        # First, so that what the probes do now is not part of the step.
        self._guarded("times", lambda: times.append(self._timer.finish_step()))
        if self.sampled:
            self._guarded("classification", lambda: self._emit(self._classified(Moment.STEADY)))
        if self._tracing is not None:
            self._guarded("peak", self._tracing.finish)
            self._activations.forget_observer()
        self._measure_outside()
        return StepReading(
            times=times[0] if times else None,
            phase_memory=self._phase_memory,
            profiled=self._step == self._kernel_step,
        )

    def change(self, *, classify_every: int) -> None:
        """Between two steps, after the run was changed: the coming step is classified, whatever the rate."""
        self._classify_every = classify_every
        self._changed = True

    def close(self) -> None:
        """After the last step: nothing of the engine refers to the probes any more.

        Its optimizer would keep them, and they it, until garbage is collected: a model's worth of memory
        where another engine is to follow.
        """
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
            self._optimizer_hook = None
        if self._peaks is not None:
            self._peaks.abandon()
        self._activations.forget_observer()

    def peaks(self) -> Peaks:
        return self._memory.peaks()

    @property
    def sampled(self) -> bool:
        """Whether this step's tensors are classified."""
        return self._step == self._changed_step or is_classified(self._step, self._classify_every)

    @property
    def _tracing(self) -> PeakProbe | None:
        """The peak probe while it records."""
        return self._peaks if self._peaks is not None and self._peaks.active else None

    def _peak_probe(self, tracer: Tracer, device: torch.device, vocab_size: int) -> PeakProbe:
        return PeakProbe(
            self._engine.module,
            tracer,
            device=device,
            vocab_size=vocab_size,
            hidden_size=hidden_size_of(self._engine.module),
            emit=self._emit,
            buffers=partial(buffer_tensors, self._engine),
        )

    def _begin_trace(self) -> None:
        """At the first phase of a sampled step's last micro-batch."""
        probe = self._peaks
        if probe is None or self._asked_step == self._step:
            return
        # Once a step: a trace that began in its middle would not know what earlier phases made.
        self._asked_step = self._step
        always = self._step in _ALWAYS_CLASSIFIED or self._step == self._changed_step
        if always or probe.is_due(self._highest_phase_peak):
            probe.begin(self._step)

    def _end_traced_phase(self, phase: Phase) -> None:
        if self._tracing is not None:
            self._tracing.end_phase(phase)

    def _watching(self, phase: Phase) -> AbstractContextManager[None]:
        """What watches a phase of a sampled step from inside."""
        tracing = self._tracing
        if phase == "forward" and "activations" not in self._broken:
            return self._activations.watching(None if tracing is None else tracing.watch.see)
        if phase == "backward" and tracing is not None:
            return tracing.watch.backward()
        return nullcontext()

    def _measure_outside(self) -> None:
        self._steps += 1
        moment = _OUTSIDE_AFTER.get(self._steps)
        outside = self._outside
        if outside is not None and moment is not None:
            self._guarded("outside", lambda: outside.measure(moment))

    def _tell_kernels(self) -> None:
        self._emit(recognise(self._step, self._kernels.stop()))

    def _keep_memory(self, phase: Phase) -> None:
        memory = self._memory.stop_phase()
        self._phase_memory[phase] = merge(self._phase_memory.get(phase), memory)
        if memory.reserved_bytes is not None:
            self._highest_phase_peak = max(self._highest_phase_peak, memory.peak_bytes or 0)

    def _classify_after(self, phase: Phase) -> None:
        if phase == "forward":
            self._emit(self._classified(Moment.FORWARD_END))
        elif phase == "backward":
            self._emit(self._classified(Moment.FIRST_BLOCK_BACKWARD))
        elif phase == "optimizer" and self._inside_step is not None:
            self._emit(self._inside_step)

    def _classified(self, moment: Moment) -> MemoryClassified:
        found = classify(self._engine, on_cpu=self._on_cpu)
        if self._tracing is not None:
            self._tracing.watch.see_storages(found.storages)
        components = dict(found.device)
        if moment is Moment.FORWARD_END and "activations" not in self._broken:
            saved = self._activations.saved_bytes()
            components[Component.ACTIVATIONS] = saved.activations
            components[Component.LOGITS] = saved.logits
        heap = read_heap() if self._on_cpu else None
        if heap is not None:
            components[Component.FRAGMENTATION] = max(0, heap.free_bytes - self._heap_free_before)
        return MemoryClassified(
            step=self._step,
            moment=moment,
            components=components,
            host_components=found.host,
            total_bytes=self._memory.total_bytes(),
        )

    def _watch_optimizer_step(self) -> Any:
        """See the tensors at the end of the inner optimizer's step, where its gradients still exist. The
        hook's handle."""
        inner = getattr(self._engine, "basic_optimizer", None)
        register = getattr(inner, "register_step_post_hook", None)
        return None if register is None else register(self._after_inner_step)

    def _after_inner_step(self, *_: Any) -> None:
        # ZeRO steps group by group: the fullest of the calls is the moment's.
        if self.sampled:
            self._guarded("classification", self._keep_fullest)

    def _keep_fullest(self) -> None:
        seen = self._classified(Moment.OPTIMIZER_STEP)
        kept = self._inside_step
        if kept is None or sum(seen.components.values()) > sum(kept.components.values()):
            self._inside_step = seen

    def _guarded(self, probe: str, call: Callable[[], None]) -> None:
        if probe in self._broken:
            return
        try:
            call()
        except Exception:
            self._broken.add(probe)
            if probe == "peak" and self._peaks is not None:
                self._peaks.abandon()
            logger.exception("the probe of %s failed in step %d and is off from here on", probe, self._step)

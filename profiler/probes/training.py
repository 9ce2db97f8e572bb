"""The probes of one training process, as the loop uses them: a step, its phases, its readings.

A probe that fails says so in the log and stays off; it never stops the training.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import median_low
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

import torch

from llmtop.profiler.effects.kernelnames import recognise
from llmtop.profiler.memory.result import Component, Moment
from llmtop.profiler.probes.activations import ActivationCounter
from llmtop.profiler.probes.allocator import Peaks, memory_meter
from llmtop.profiler.probes.classify import buffer_tensors, classify, modules_of
from llmtop.profiler.probes.due import ALWAYS_MARKED, Marking, is_classified, is_first, next_classified
from llmtop.profiler.probes.heap import read_heap
from llmtop.profiler.probes.kernels import KernelRecorder
from llmtop.profiler.probes.outside import OutsideProbe
from llmtop.profiler.probes.peaks import PeakProbe, hidden_size_of
from llmtop.profiler.probes.phases import PHASES, StepTimes, WholeStep, phase_timer
from llmtop.profiler.probes.readings import MemoryReadings, counted_every
from llmtop.profiler.probes.stepreading import AtItsEnd, PlainSteps, StepReading
from llmtop.profiler.probes.tracer import CudaTracer, Tracer
from llmtop.profiler.record.events import AnyEvent, MemoryClassified, Phase

logger = logging.getLogger(__name__)

Given = ParamSpec("Given")
Answer = TypeVar("Answer")

_REMEMBERED = 5
"""Costs of classifying."""

_NOTHING = nullcontext()


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
        sparing: bool = False,
        emit: Callable[[AnyEvent], None],
    ) -> None:
        """In `kernel_step` the rank that `records_kernels` names what runs; the other ranks wait for it.

        `sparing`: nobody has asked for `classify_every`, so it is only the least: it grows where classifying
        takes much of a step.
        `tracer` is the record of the device's allocator; on CUDA there always is one.
        """
        self._engine = engine
        self._on_cpu = device.type == "cpu"
        self._emit = emit
        self.classify_every = classify_every
        self._least_every = classify_every if sparing else None
        self._counting_seconds = 0.0
        """What classifying took of this step."""
        self._counted: deque[float] = deque(maxlen=_REMEMBERED)
        self._timer = phase_timer(device)
        self._memory = MemoryReadings(memory_meter(device))
        self._closely = True
        """Whether more than times is taken of this step."""
        self._plain: PlainSteps | None = None
        """What `begin_step` answers of the steps before its `until`."""
        self._marking = Marking()
        self._follows = False
        """Whether the step before was one of those, and nothing was done since."""
        self._timed = {phase: AtItsEnd(phase, self._timer.stop, self._turn_off) for phase in PHASES}
        self._read = {phase: AtItsEnd(phase, self._stop_read, self._turn_off) for phase in PHASES}
        self._activations = ActivationCounter(vocab_size)
        # What the heap kept free before the model existed is part of the runtime's baseline.
        self._heap_free_before = heap_free_before_bytes
        self._kernels = KernelRecorder(device)
        self._kernel_step = kernel_step
        self._records_kernels = records_kernels
        self._outside = outside
        if tracer is None and device.type == "cuda":
            tracer = CudaTracer(device)
        self._peaks = None if tracer is None else self._peak_probe(tracer, device, vocab_size)
        self._broken: set[str] = set()
        self._step = self._first_step = 0
        self.sampled = self.profiled = False
        """Whether this step's tensors are classified; whether its kernels are recorded, by this rank or by
        one that it waits for."""
        self._asked_step: int | None = None
        """The last step that a trace was considered for."""
        self._changed = False
        self._changed_step: int | None = None
        self._inside_step: MemoryClassified | None = None
        self._modules: list[torch.nn.Module] = []
        """The engine's, in a step whose tensors are classified; a script may change them between two."""
        self._optimizer_hook = self._watch_optimizer_step()

    def begin_step(self, step: int) -> PlainSteps | None:
        """A step begins now. Where nothing but times is taken of it, what may be used instead of `phase` and
        `finish_step`: that can only fail with the device, and the training with it. It goes for later steps
        too where the caller neither settles nor changes anything before it calls this again.
        """
        # A step that fails leaves its recording on: to end it waits for the device, which may never come.
        if self._plain is None or step >= self._plain.until:
            self._plain = self._ask_of_step(step)
        self._step = step
        if self._follows and self._plain is not None:
            self._guarded("times", self._timer.go_on, self._marking.is_marked(step))
        else:
            self._guarded("times", self._timer.start_step)
        self._follows = self._plain is not None
        return self._plain

    def _ask_of_step(self, step: int) -> PlainSteps | None:
        """What is to be taken of one that begins, and of those after it."""
        self._step = step
        if self._changed or not self._first_step:
            self._marking = Marking(every=self._timer.borders_every, until=step + ALWAYS_MARKED)
        self._first_step = self._first_step or step
        if self._changed:
            self._changed, self._changed_step = False, step
        self._inside_step = None
        self.sampled = step == self._changed_step or is_classified(
            step, self.classify_every, self._first_step
        )
        self.profiled = step == self._kernel_step
        self._closely = self._memory.is_due(step) or self.sampled or self.profiled
        if self._closely:
            self._guarded("memory", self._memory.start_step)
        else:
            self._memory.pass_step()
        if self._closely or "times" in self._broken:
            return None
        until = min(
            self._memory.next_due(step),
            next_classified(step, self.classify_every, self._first_step),
            math.inf if self._kernel_step is None or self._kernel_step <= step else self._kernel_step,
        )
        seen = StepReading(times=None, phase_memory={}, memory_every=self._memory.rate.every)
        return PlainSteps(
            self._timer.marks(), self._marking, self._finish_plain, self._go_on_plain, until, seen
        )

    def _finish_plain(self) -> StepTimes | None:
        return self._guarded("times", self._timer.finish_step)

    def _go_on_plain(self) -> None:
        self._guarded("times", self._timer.go_on)

    def _ask_again(self) -> None:
        """Of the coming step, and begin it by itself."""
        self._plain, self._follows = None, False

    def phase(self, phase: Phase, *, last: bool) -> AbstractContextManager[None]:
        """One phase of one micro-batch; `last` marks the micro-batch that ends with the optimizer step."""
        if self.sampled or self.profiled:
            return self._watched(phase, last=last)
        return (self._read if self._closely else self._timed).get(phase, _NOTHING)

    def _stop_read(self, phase: Phase) -> None:
        """In a step of which memory is read, and nothing else than that and times."""
        self._guarded("times", self._timer.stop, phase)
        self._guarded("memory", self._memory.stop_phase, phase)
        # What the probes did here is no part of the phase that comes.
        self._guarded("times", self._timer.start)

    @contextmanager
    def _watched(self, phase: Phase, *, last: bool) -> Iterator[None]:
        sampled = last and self.sampled
        if last and self._begin_recording(phase):
            self._guarded("times", self._timer.start)
        with self._watching(phase) if sampled else _NOTHING:
            yield
        self._guarded("times", self._timer.stop, phase)
        if self._tracing is not None:
            self._guarded("peak", self._tracing.end_phase, phase)
        self._guarded("memory", self._memory.stop_phase, phase)
        if sampled:
            self._guarded("classification", self._classify_after, phase)
        if phase == "optimizer" and self._kernels.running:
            self._guarded("kernels", self._tell_kernels)
        self._guarded("times", self._timer.start)

    def finish_step(self) -> StepReading:
        """Call at the end of a step, after its last phase."""
        self._follows = False
        # First, so that what the probes do now is not part of the step.
        times = self._guarded("times", self._timer.finish_step)
        if times is not None and not self._marking.is_marked(self._step):
            # More was taken of it by this rank's own clock, or for it alone.
            times = WholeStep(times)
        if self._closely:
            self._finish_closely()
        return StepReading(
            times=times,
            phase_memory=self._memory.phases,
            profiled=self.profiled,
            memory_every=self._memory.rate.every,
        )

    def settle(self) -> None:
        """Call before what takes memory of its own between two steps: it is no step's."""
        self._ask_again()
        self._guarded("memory", self._memory.settle)

    def change(self, *, classify_every: int) -> None:
        """Between two steps, after the run was changed: the coming step is classified, whatever the rate."""
        self.classify_every = classify_every
        self._changed = True
        self._ask_again()
        self._guarded("memory", self._memory.change)

    def abandon_step(self) -> None:
        """After a step that was broken off and is to be made again: nothing that was begun in it goes on."""
        self._follows = False
        if self._peaks is not None:
            self._peaks.abandon()
        self._activations.forget_observer()
        if self._kernels.running:
            # What it would tell is of half a step.
            self._guarded("kernels", self._kernels.stop)

    def close(self) -> None:
        """After the last step: nothing of the engine refers to the probes any more.

        Its optimizer would keep them, and they it, until garbage is collected: a model's worth of memory
        where another engine is to follow.
        """
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
            self._optimizer_hook = None
        self._timed, self._read = {}, {}  # each phase refers to the probes
        if self._peaks is not None:
            self._peaks.abandon()
        self._activations.forget_observer()

    def peaks(self) -> Peaks:
        return self._memory.meter.peaks()

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

    def _begin_recording(self, phase: Phase) -> bool:
        """Before a phase of the last micro-batch: begin what this step records; whether anything began."""
        kernels = phase == "forward" and self._records_kernels and self.profiled
        trace = self.sampled and self._peaks is not None and self._asked_step != self._step
        if kernels:
            self._guarded("kernels", self._kernels.start)
        if trace:
            self._guarded("peak", self._begin_trace)
        return kernels or trace

    def _begin_trace(self) -> None:
        """At the first phase of a sampled step's last micro-batch."""
        probe = self._peaks
        if probe is None:
            return
        # Once a step: a trace that began in its middle would not know what earlier phases made.
        self._asked_step = self._step
        always = is_first(self._step, self._first_step) or self._step == self._changed_step
        if always or probe.is_due(self._memory.highest_phase_peak_bytes):
            probe.begin(self._step)

    def _watching(self, phase: Phase) -> AbstractContextManager[None]:
        """What watches a phase of a sampled step from inside."""
        tracing = self._tracing
        if phase == "forward" and "activations" not in self._broken:
            return self._activations.watching(None if tracing is None else tracing.watch.see)
        if phase == "backward" and tracing is not None:
            return tracing.watch.backward()
        return nullcontext()

    def _spare(self) -> None:
        self._counted.append(self._counting_seconds + self._activations.seconds)
        self._counting_seconds = 0.0
        if self._least_every is not None:
            # Of two the lower, as for readings.
            cost = median_low(self._counted)
            self.classify_every = counted_every(self._least_every, cost, self._memory.rate.step_seconds)

    def _tell_kernels(self) -> None:
        self._emit(recognise(self._step, self._kernels.stop()))

    def _finish_closely(self) -> None:
        if self.sampled:
            self._guarded("classification", self._classify_steady)
            self._spare()
        self._guarded("memory", self._memory.finish_step, plain=not (self.sampled or self.profiled))
        if self._tracing is not None:
            self._guarded("peak", self._tracing.finish)
            self._activations.forget_observer()
        if self._outside is not None:
            self._guarded("outside", self._outside.after_steps, self._memory.rate.steps)

    def _classify_after(self, phase: Phase) -> None:
        if phase == "forward":
            self._emit(self._classified(Moment.FORWARD_END))
        elif phase == "backward":
            self._emit(self._classified(Moment.FIRST_BLOCK_BACKWARD))
        elif phase == "optimizer" and self._inside_step is not None:
            self._emit(self._inside_step)

    def _classify_steady(self) -> None:
        self._emit(self._classified(Moment.STEADY))
        self._modules = []

    def _classified(self, moment: Moment) -> MemoryClassified:
        began = perf_counter()
        self._modules = self._modules or modules_of(self._engine.module)
        found = classify(self._engine, on_cpu=self._on_cpu, modules=self._modules)
        if self._tracing is not None:
            self._tracing.watch.see_storages(found.storages)
        components = dict(found.device)
        if moment is Moment.FORWARD_END and "activations" not in self._broken:
            saved = self._activations.saved_bytes(found.addresses_of(Component.PARAMETERS))
            components[Component.ACTIVATIONS] = saved.activations
            components[Component.LOGITS] = saved.logits
        heap = read_heap() if self._on_cpu else None
        if heap is not None:
            components[Component.FRAGMENTATION] = max(0, heap.free_bytes - self._heap_free_before)
        self._counting_seconds += perf_counter() - began
        return MemoryClassified(
            step=self._step,
            moment=moment,
            components=components,
            host_components=found.host,
            drive_components=found.drive,
            total_bytes=self._memory.meter.total_bytes(),
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

    def _guarded(
        self, probe: str, call: Callable[Given, Answer], *given: Given.args, **named: Given.kwargs
    ) -> Answer | None:
        """The call's answer; None where it failed, now or before."""
        if probe in self._broken:
            return None
        try:
            return call(*given, **named)
        except Exception:  # noqa: BLE001 - shown in full by what it calls
            self._turn_off(probe)
            return None

    def _turn_off(self, probe: str) -> None:
        """In the handler of what it raised."""
        self._broken.add(probe)
        if probe == "times":
            self._timed = {}
            self._ask_again()
        if probe == "peak" and self._peaks is not None:
            self._peaks.abandon()
        logger.exception("the probe of %s failed in step %d and is off from here on", probe, self._step)

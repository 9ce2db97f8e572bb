"""One engine in this process, and blocks of steps on it with or without what is to be measured.

Needs torch and DeepSpeed. The process is rank 0 of a run of one; it must end when the blocks are done.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.cells import Planned, make_run
from benchmarks.stats import BlockTime
from llmtop.profiler.probes.due import Marking
from llmtop.profiler.probes.outside import OutsideProbe
from llmtop.profiler.probes.phases import NO_MARKS, Marks, StepTimes
from llmtop.profiler.probes.stepreading import PlainSteps, StepReading
from llmtop.profiler.record.eventlog import FLUSHER, EventWriter
from llmtop.profiler.record.events import Phase
from llmtop.trainer.ops import ops_of
from llmtop.trainer.supervisor.extensions import extensions_dir
from llmtop.trainer.supervisor.rankenv import free_port, rank_environment
from llmtop.trainer.worker.build import build_model
from llmtop.trainer.worker.callbacks import Callback, StepOutcome
from llmtop.trainer.worker.loop import Probes
from llmtop.trainer.worker.opbuild import build_ops
from llmtop.trainer.worker.place import place_from_environment
from llmtop.trainer.worker.process_group import join_process_group
from llmtop.trainer.worker.profiling import Profiling
from llmtop.trainer.worker.session import (
    build_engine,
    import_libraries,
    make_batches,
    make_loop,
    make_probes,
    make_report,
)
from llmtop.trainer.worker.stages import StageLog
from llmtop.trainer.worker.stopping import StopRequest

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


# Made once: what stands in for the probes is taken off their time, and should have none of its own.
_NOTHING = nullcontext()
_NOTHING_READ = StepReading(times=None, phase_memory={})
_NO_TIMES: Any = float
_NOTHING_TAKEN = PlainSteps(NO_MARKS, Marking(), _NO_TIMES, lambda: None, math.inf, _NOTHING_READ)


class NoProbes:
    """Looks like the probes and does nothing."""

    def begin_step(self, step: int) -> PlainSteps:
        return _NOTHING_TAKEN

    def phase(self, phase: Phase, *, last: bool) -> AbstractContextManager[None]:
        return _NOTHING

    def finish_step(self) -> StepReading:
        return _NOTHING_READ


class NoReport:
    """A callback that does nothing."""

    def after_step(self, step: int) -> None:
        """Nothing."""

    def after_outcome(self, outcome: StepOutcome) -> None:
        """Nothing."""

    def at_end(self, step: int, *, save_asked: bool) -> None:
        """Nothing."""


class Inside(Struct, frozen=True, kw_only=True):
    """Seconds a step inside the calls of probes and reports."""

    work: float
    beside: float
    """Of the thread that writes what was held, while the training goes on."""
    running: float | None
    """The same in a training that nothing holds up, waits for the device included: what a step has more. None
    on the CPU, where there is nothing to wait for."""
    parts: dict[str, float]
    """The work by call."""
    running_parts: dict[str, float] | None


class Nothing(Struct, frozen=True, kw_only=True):
    """Seconds a step that the clock takes around calls that do nothing, by call.

    After a wait the clock's own code is as cold as what it measures, so there is one for each case.
    """

    idle: dict[str, float]
    """Where the device is waited for before each call."""
    running: dict[str, float]


class Stopwatch:
    """Processor time of this thread inside what is measured: steady whatever else the machine does."""

    def __init__(self, settle: Callable[[], None] | None = None) -> None:
        """`settle` runs before each call, outside its time."""
        self.seconds: dict[str, float] = defaultdict(float)
        """By call."""
        self._settle = settle
        self._began = 0.0

    def start(self) -> None:
        if self._settle is not None:
            self._settle()
        self._began = time.thread_time()

    def stop(self, name: str) -> None:
        ended = time.thread_time()
        self.seconds[name] += ended - self._began

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.start()
        yield
        self.stop(name)


class TimedProbes:
    """Probes and how long their own calls take; what they make the training do is not seen."""

    def __init__(self, probes: Probes, watch: Stopwatch) -> None:
        self._probes = probes
        self._watch = watch

    def begin_step(self, step: int) -> PlainSteps | None:
        with self._watch("step"):
            plain = self._probes.begin_step(step)
        if plain is None:
            return None

        def finish_step() -> StepTimes | None:
            with self._watch("finish"):
                return plain.finish_step()

        # Timed in every step, as those that do nothing are: the clock's own time is taken off.
        marks = self._timed(*plain.marks_of(step))
        return PlainSteps(marks, Marking(), finish_step, plain.start_step, plain.until, plain.reading)

    def phase(self, phase: Phase, *, last: bool) -> AbstractContextManager[None]:
        return self._around(phase, lambda: self._probes.phase(phase, last=last))

    def finish_step(self) -> StepReading:
        with self._watch("finish"):
            return self._probes.finish_step()

    def _timed(self, keep: Callable[[tuple[Phase, Any]], None], mark: Callable[[], Any]) -> Marks:
        """A border is a mark that is kept at once."""
        start, stop = self._watch.start, self._watch.stop

        def timed_mark() -> Any:
            start()
            return mark()

        def timed_keep(border: tuple[Phase, Any]) -> None:
            keep(border)
            stop(border[0])

        return timed_keep, timed_mark

    @contextmanager
    def _around(self, name: str, made: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        with self._watch(name):
            inner = made()
            inner.__enter__()
        yield
        with self._watch(name):
            inner.__exit__(None, None, None)


class TimedCallback:
    """A callback and how long it takes."""

    def __init__(self, callback: Callback, watch: Stopwatch) -> None:
        self._callback = callback
        self._watch = watch

    def after_step(self, step: int) -> None:
        with self._watch("reports"):
            self._callback.after_step(step)

    def after_outcome(self, outcome: StepOutcome) -> None:
        with self._watch("reports"):
            self._callback.after_outcome(outcome)

    def at_end(self, step: int, *, save_asked: bool) -> None:
        self._callback.at_end(step, save_asked=save_asked)


class Arm(Struct):
    """One way to run a block: what watches, what reports, and the hooks that belong to it."""

    probes: Probes
    callbacks: tuple[Callback, ...]
    hooks: list[dict[Any, Any]]


class Bench:
    """An engine, its data, and the arms that blocks of steps are run by."""

    def __init__(
        self, planned: Planned, root: Path, say: Callable[[str], object] = lambda words: None
    ) -> None:
        """`say` is told what is ready: on a new machine this takes minutes, most of them to compile an op."""
        self.spec = planned.spec
        self.run_dir = run = make_run(planned, root)
        extensions = extensions_dir(os.environ)
        extensions.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.environ.update(
            rank_environment(run, 0, port=free_port(), extensions=extensions, environment=os.environ)
        )
        import_libraries(self.spec)
        say("libraries loaded")
        self._place = place_from_environment()
        self.device = join_process_group(self._place, on_cpu=self.spec.on_cpu)
        say("process group up")
        self.events = EventWriter(run.events_path(0), self._place.source)
        self._batches = make_batches(run, self.spec, self._place)
        config = run.deepspeed_config()
        build_ops(ops_of(config), lambda built: say(f"op {built.name} there after {built.seconds:.1f} s"))
        self.engine = build_engine(build_model(self.spec, config, self.device), self.spec, config)
        self._stages = StageLog(self.events)
        self._step = 0
        self._flush_seconds = 0.0
        self._bare = self._hooks()
        say("engine built")

    def bare(self) -> Arm:
        """Training alone."""
        return Arm(probes=NoProbes(), callbacks=(), hooks=self._bare)

    def watched(self, *, classify_every: int) -> Arm:
        """Training as the worker does it: probes, a line in the log of events, a line in the log."""
        self._install(self._bare)
        spec = replace(self.spec, options=replace(self.spec.options, classify_every=classify_every))
        emit = self.events.write
        outside = None if spec.on_cpu else OutsideProbe(self._place.local_rank, emit)
        first = self._step + 1
        probes = make_probes(
            self.engine, spec, self._place, self.device, emit, first_step=first, outside=outside
        )
        watching = Profiling(
            self.run_dir,
            probes,
            self.engine,
            rank=self._place.rank,
            device=self.device,
            kernel_step=None,
            first_step=first,
            emit=emit,
        )
        log = os.open(self.run_dir.log_path(0), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        report = make_report(spec, self._place, self.events.hold, lambda line: _write(log, line))
        return Arm(probes=watching, callbacks=(report,), hooks=self._hooks())

    def nothing_seconds(self, steps: int) -> Nothing:
        """What the clock itself takes around calls that do nothing, by call, for one step."""
        bare = replace(self.bare(), callbacks=(NoReport(),))
        idle, running = self._inside(bare, steps, self._settle)[0], self._inside(bare, steps)[0]
        return Nothing(idle=idle, running=running)

    def inside_seconds(self, watched: Arm, steps: int, nothing: Nothing) -> Inside:
        """Processor time a step inside the calls of probes and reports, over a block of `steps`.

        With an idle device before each call there is nothing to wait for, so that is the calls' work.
        `nothing` is what to take off: `nothing_seconds`.
        """
        idle, beside = self._inside(watched, steps, self._settle)
        parts = _less(idle, nothing.idle)
        running = None if self._settle is None else _less(self._inside(watched, steps)[0], nothing.running)
        return Inside(
            work=sum(parts.values()),
            beside=beside,
            running=None if running is None else sum(running.values()),
            parts=parts,
            running_parts=running,
        )

    @property
    def _settle(self) -> Callable[[], None] | None:
        return self._wait if self.device.type == "cuda" else None

    def _inside(
        self, arm: Arm, steps: int, settle: Callable[[], None] | None = None
    ) -> tuple[dict[str, float], float]:
        """In each of the calls, and in the thread of the writer."""
        watch = Stopwatch(settle)
        timed = Arm(
            probes=TimedProbes(arm.probes, watch),
            callbacks=tuple(TimedCallback(callback, watch) for callback in arm.callbacks),
            hooks=arm.hooks,
        )
        self.step_seconds(timed, 2)
        watch.seconds.clear()
        before = self._writing_seconds()
        self.step_seconds(timed, steps)
        beside = (self._writing_seconds() - before) / steps
        return {name: seconds / steps for name, seconds in watch.seconds.items()}, beside

    def step_seconds(self, arm: Arm, steps: int) -> BlockTime:
        """Means over a block of `steps`, from an idle device to an idle device."""
        self._install(arm.hooks)
        loop = make_loop(
            self.engine,
            self._batches,
            self.spec,
            self._place,
            self.device,
            probes=arm.probes,
            callbacks=arm.callbacks,
            stages=self._stages,
            stop=StopRequest(),
        )
        first = self._step + 1
        self._step += steps
        self._wait()
        began, busy = time.perf_counter(), time.process_time()
        loop.run(first, self._step)
        self._flush()
        self._wait()
        wall, cpu = time.perf_counter() - began, time.process_time() - busy
        return BlockTime(wall=wall / steps, cpu=cpu / steps)

    def _flush(self) -> None:
        """What a block has told is written within it."""
        began = time.thread_time()
        self.events.flush()
        self._flush_seconds += time.thread_time() - began

    def _writing_seconds(self) -> float:
        """Processor time so far that writing took which the training did not wait for."""
        return self._flush_seconds + _flusher_seconds()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _hook_tables(self) -> Iterator[Any]:
        for module in self.engine.module.modules():
            for name in _HOOKS:
                yield getattr(module, name)
        for name in _OPTIMIZER_HOOKS:
            yield getattr(self.engine.basic_optimizer, name, {})

    def _hooks(self) -> list[dict[Any, Any]]:
        return [dict(table) for table in self._hook_tables()]

    def _install(self, hooks: list[dict[Any, Any]]) -> None:
        for table, wanted in zip(self._hook_tables(), hooks, strict=True):
            if list(table) != list(wanted):
                table.clear()
                table.update(wanted)


def _less(seconds: Mapping[str, float], nothing: Mapping[str, float]) -> dict[str, float]:
    return {name: taken - nothing.get(name, 0.0) for name, taken in seconds.items()}


def _flusher_seconds() -> float:
    """Processor time so far of the thread that writes events; 0 before there is one."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name == FLUSHER and thread.ident is not None
    )


def _write(log: int, line: str) -> None:
    os.write(log, f"{line}\n".encode())

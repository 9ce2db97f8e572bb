"""One cell of an experiment: options in, a run in fresh processes, one row out."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.admission import Gate, need_of
from benchmarks.forkserver import ForkServer, ForkServerError
from benchmarks.rows import Cell, Row
from benchmarks.timeleft import TOO_LATE, TimeLeft
from benchmarks.window import tokens_per_second
from benchmarks.zygote import WORKER
from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.resolve import Layer, Machine, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.breakdown import breakdown
from llmtop.profiler.fold.rankstate import RankState
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.profiler.hardware.sampler import Sampler
from llmtop.profiler.memory.predict import predict, predict_closely
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.deviceevents import DeviceSample
from llmtop.profiler.record.eventlog import EventTail, EventWriter
from llmtop.profiler.record.events import AnyEvent, HardwareSampled, StageBegan, StageFinished, StepFinished
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import HARDWARE, RunDir
from llmtop.trainer.control import wait_for_end
from llmtop.trainer.dsconfig import deepspeed_config
from llmtop.trainer.launch import start_run
from llmtop.trainer.ops import ops_of
from llmtop.trainer.preflight import preflight
from llmtop.trainer.stacks import take_stacks
from llmtop.trainer.supervisor.extensions import extensions_dir, op_library

DEFAULTS: Cell = {"steps": 4, "classify_every": 2, "tokenizer": "bytes", "kernel_profile_step": 0}
"""Of every cell: memory is steady after two steps, and does not depend on what the tokens say. The profiler
of kernel names takes device memory of its own."""
BUILDER = "benchmarks.opbuild:main"
BUILD_SECONDS = 300.0
"""DeepSpeed's fused Adam alone takes over a minute."""
_LOOK_SECONDS = 10.0
"""Before a run is ended for its length it is asked where it stands, which takes seconds with py-spy."""
_SHOWN_STACKS = 6000
_STAMPS = ("v", "t", "m", "src", "kind", "traceback")


class Planned(Struct, frozen=True, kw_only=True):
    """A cell that can run here."""

    cell: Cell
    spec: RunSpec
    prediction: Prediction


class Carried(Struct, frozen=True, kw_only=True):
    """A run that was carried out."""

    run: RunDir
    cut_after_seconds: float | None = None
    """The time that it was given, where nothing but that ended it."""
    stacks: str = ""
    """Where its ranks stood shortly before that."""


def plan(cell: Cell, machine: Machine, *, name: str, closely: bool = True) -> Planned:
    """Resolve and predict a cell; raises LlmtopError for one that is refused.

    Without `closely` the allocator is not simulated, which takes a hundred times as long and changes nothing
    about what fits.
    """
    layer = Layer(source=ValueSource.COMMAND_LINE, detail="cell", values={**DEFAULTS, **cell})
    spec = resolve([layer], name=name, machine=machine)
    return Planned(cell=cell, spec=spec, prediction=predict_closely(spec) if closely else predict(spec))


class Runner:
    """Carries out cells under a root folder, by forking or (without a server) through the supervisor.

    May be called from several threads.
    """

    def __init__(
        self,
        root: Path,
        machine: Machine,
        gate: Gate,
        server: ForkServer | None,
        time_left: TimeLeft | None = None,
    ) -> None:
        self._root = root
        self._machine = machine
        self._gate = gate
        self._server = server
        self._time_left = time_left
        self._nvml = NvmlReader()
        self._building = threading.Lock()
        self._ops: set[str] = set()
        """Those that need not be looked for any more."""

    def close(self) -> None:
        self._nvml.close()

    def row(self, cell: Cell, seconds: float, *, name: str = "cell") -> Row:
        """The cell's row; a refusal is a row as well."""
        try:
            planned = self.plan(cell, name=name)
            # Not in the gate: while one op is built the runs that do not need it go on.
            self._build_ops(planned)
            with self._gate.enter(need_of(planned.prediction, planned.spec.options.optimizer)) as gate:
                began = time.monotonic()
                allowed = self._allowed(seconds)
                if allowed is None:
                    return {"cell": cell, "status": TOO_LATE, "reason": ""}
                carried = self.run(planned, allowed)
                alone, wall_seconds = gate.alone, time.monotonic() - began
            return row_of(planned, carried, alone=alone, wall_seconds=wall_seconds)
        except ForkServerError:
            # Not the cell's fault, so nothing that a later call may skip.
            raise
        except LlmtopError as error:
            return {"cell": cell, "status": "refused", "reason": str(error)}

    def plan(self, cell: Cell, *, name: str) -> Planned:
        return plan(cell, self._machine, name=name)

    def _allowed(self, seconds: float) -> float | None:
        """Of the seconds that a run was to have, what is left after waiting."""
        if self._time_left is None:
            return seconds
        left = self._time_left.seconds_for_a_run()
        return None if left is None else min(left, seconds)

    def run(self, planned: Planned, seconds: float) -> Carried:
        """From nothing to the end of the run."""
        if self._server is None:
            run = start_run(planned.spec, planned.prediction, root=self._root)
            wait_for_end(run, seconds)
            return Carried(run=run)
        return self.forked(planned, seconds)

    def forked(self, planned: Planned, seconds: float, *, entry: str = WORKER) -> Carried:
        """The same by forking, of whatever carries a run out."""
        if self._server is None:
            raise UsageError("only our own worker can be supervised", fix="leave --supervised out")
        self._build_ops(planned)
        return self._carry_out(self._server, planned, seconds, entry)

    def _carry_out(self, server: ForkServer, planned: Planned, seconds: float, entry: str) -> Carried:
        run = make_run(planned, self._root)
        sampled = _Sampled(run, self._nvml, on_cpu=planned.spec.on_cpu)
        looked = _LookedAt(run, seconds)

        def while_running(pids: dict[int, int]) -> None:
            sampled(pids)
            looked()

        try:
            ended = server.run(run, seconds=seconds, entry=entry, while_running=while_running)
        finally:
            sampled.close()
        cut = ended.cut_after_seconds
        return Carried(run=run, cut_after_seconds=cut, stacks="" if cut is None else looked.stacks)

    def _build_ops(self, planned: Planned) -> None:
        """Have DeepSpeed's ops that a run needs built once, before and outside of its own time.

        By the zygote only; the supervisor's runs build for themselves.
        """
        if self._server is None:
            return
        ops = {op.name for op in ops_of(deepspeed_config(planned.spec))}
        if ops <= self._ops:
            return
        with self._building:
            folder = extensions_dir(os.environ)
            missing = {op for op in ops - self._ops if not op_library(folder, op).exists()}
            if missing:
                began = time.monotonic()
                run = self._carry_out(self._server, planned, BUILD_SECONDS, BUILDER).run
                took = f"{time.monotonic() - began:.1f} s"
                print(f"{took} to build {', '.join(sorted(missing))}", flush=True)
                if not all(op_library(folder, op).exists() for op in missing):
                    print(_tail(run.log_path(0)), flush=True)
            # What cannot be built is not tried again here: each run that needs it says so.
            self._ops |= ops


def make_run(planned: Planned, root: Path) -> RunDir:
    """A run's folder as a launch makes it, without a supervisor."""
    preflight(planned.spec)
    return RunDir.create(root, planned.spec, planned.prediction, deepspeed_config(planned.spec))


class _Sampled:
    """The supervisor's samples of the hardware, taken by us: every reading, every time."""

    def __init__(self, run: RunDir, nvml: NvmlReader, *, on_cpu: bool) -> None:
        # The reader is everybody's, and outlives the run.
        self._sampler = Sampler(nvml=nvml, device_indices=() if on_cpu else None, slow_every=1)
        self._events = EventWriter(run.events_path(HARDWARE), HARDWARE)

    def __call__(self, pids: dict[int, int]) -> None:
        self._events.write(self._sampler.sample(pids))

    def close(self) -> None:
        self._events.close()


class _LookedAt:
    """Asks a run that has nearly used up its time where its ranks stand, once: a hang shows its place."""

    def __init__(self, run: RunDir, seconds: float) -> None:
        self._run = run
        self._at = time.monotonic() + seconds - _LOOK_SECONDS if seconds > 2 * _LOOK_SECONDS else math.inf
        self.stacks = ""

    def __call__(self) -> None:
        if time.monotonic() < self._at:
            return
        self._at = math.inf
        try:
            self.stacks = take_stacks(self._run, read_state(self._run)).text
        except UsageError as error:
            self.stacks = str(error)


def row_of(planned: Planned, carried: Carried, *, alone: bool, wall_seconds: float) -> Row:
    """Predicted and measured side by side."""
    run = carried.run
    state = read_state(run)
    failed = state.status != "completed"
    return {
        "cell": planned.cell,
        "status": state.status,
        "reason": state.ended.reason if state.ended else None,
        "cut_after_seconds": carried.cut_after_seconds,
        "wall_seconds": round(wall_seconds, 1),
        "alone": alone,
        "gpus": planned.spec.options.gpus,
        "family": planned.spec.model.family,
        "device": _device_name(state) or planned.spec.gpu.name,
        "seed": planned.spec.options.seed,
        "versions": next((r.model.versions for r in state.ranks.values() if r.model), {}),
        "predicted": predicted_row(planned.prediction),
        "measured": {
            "ranks": [_rank(rank, run) for _, rank in sorted(state.ranks.items())],
            "device_bytes": state.peak_device_bytes if alone else None,
            "own_device_bytes": _own_device_bytes(run),
            "pss_bytes": state.peak_pss_bytes,
            "log_tail": _tail(run.log_path(0)) if failed else "",
            "stacks": carried.stacks[:_SHOWN_STACKS],
        },
        "tokens_per_second": tokens_per_second(run),
        "breakdown": _breakdown(state, planned),
    }


def predicted_row(prediction: Prediction) -> Row:
    """A prediction as it stands in a row."""
    whole: Row = msgspec.to_builtins(prediction)
    for long in ("suggestions", "assumptions"):
        whole.pop(long)
    whole["moments"] = {moment.name: msgspec.to_builtins(moment.components) for moment in prediction.moments}
    return whole


def _rank(rank: RankState, run: RunDir) -> Row:
    last = rank.last_step
    events = EventTail(run.events_path(rank.rank)).poll()
    steps = [event for event in events if isinstance(event, StepFinished)]
    read = next((step.phase_memory for step in reversed(steps) if step.phase_memory), {})
    return {
        "rank": rank.rank,
        "peaks": {
            phase: [memory.allocated_bytes, memory.peak_bytes, memory.reserved_bytes]
            for phase, memory in read.items()
        },
        "largest": {phase: memory.peak_bytes for phase, memory in rank.peaks.items()},
        "reserved": max((m.reserved_bytes or 0 for m in rank.peaks.values()), default=None),
        "step_seconds": [step.step_seconds for step in steps],
        "loss": last.loss if last else None,
        "stages": {stage.stage: stage.seconds for stage in rank.stages},
        "events": newest_events(events),
    }


def newest_events(events: list[AnyEvent]) -> dict[str, Row]:
    """The newest event of each kind and moment without its stamps; what a later version adds comes along."""
    newest: dict[str, Row] = {}
    for event in events:
        if isinstance(event, StageBegan | StageFinished):
            continue
        whole: Row = msgspec.to_builtins(event)
        kind = ".".join(str(whole[key]) for key in ("kind", "moment") if key in whole)
        newest[kind] = {key: value for key, value in whole.items() if key not in _STAMPS}
    return newest


def _breakdown(state: RunState, planned: Planned) -> Row | None:
    if not state.ranks:
        return None
    found = breakdown(state, planned.spec, planned.prediction)
    whole: Row = msgspec.to_builtins(found)
    whole["unexplained_percent"] = found.unexplained_percent
    return whole


def _samples(run: RunDir) -> list[DeviceSample]:
    samples = EventTail(run.events_path(HARDWARE)).poll()
    return [device for event in samples if isinstance(event, HardwareSampled) for device in event.devices]


def _own_device_bytes(run: RunDir) -> dict[int, int]:
    """The most that this run's own processes held of each device; empty where the driver does not tell."""
    peaks: dict[int, int] = {}
    for device in _samples(run):
        if device.own_memory_bytes:
            peaks[device.index] = max(peaks.get(device.index, 0), device.own_memory_bytes)
    return peaks


def _device_name(state: RunState) -> str | None:
    return next((device.name for device in (state.hardware.devices if state.hardware else ())), None)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:] if log.exists() else ""

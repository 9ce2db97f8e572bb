"""The kinds of snapshot that a rank can take: each records some steps and then writes its files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from llmtop.profiler.probes.recomputing import is_reentrant, recomputes
from llmtop.profiler.probes.snapshotmodules import ModuleWatch
from llmtop.profiler.probes.stepreading import StepReading
from llmtop.profiler.probes.traces import TraceRecorder
from llmtop.profiler.record.events import Phase
from llmtop.profiler.record.snapshotevents import SnapshotKind
from llmtop.profiler.record.snapshotrequest import SnapshotRequest
from llmtop.profiler.record.wholefile import document, write_atomic
from llmtop.profiler.snapshots import reduce
from llmtop.profiler.snapshots.estimate import STACKS_END_IT
from llmtop.profiler.snapshots.modules import ModuleTable


class Writing(Protocol):
    """Files that are written while the training goes on."""

    paths: tuple[Path, ...]

    def poll(self) -> str | None:
        """None while it goes on; then what went wrong, empty for nothing."""
        ...

    def wait(self, seconds: float) -> None: ...


class Recording(Protocol):
    """What looks at some steps of one rank."""

    def start(self, step: int) -> None: ...

    def phase(self, phase: Phase) -> AbstractContextManager[Any]: ...

    def phase_ended(self, phase: Phase) -> None:
        """Of a step's last micro-batch."""
        ...

    def finish(self, reading: StepReading) -> Writing:
        """After the last step."""
        ...

    def abandon(self) -> None: ...


class _Written:
    """All is there already."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths

    def poll(self) -> str:
        return ""

    def wait(self, seconds: float) -> None:
        """Nothing is left to wait for."""


class _ByProcess:
    """A process that ends with a last line: what went wrong, or nothing."""

    def __init__(self, command: list[str], paths: tuple[Path, ...]) -> None:
        self.paths = paths
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)

    def poll(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        said = "" if self._process.stdout is None else self._process.stdout.read().strip()
        if code:
            return f"the process that reads the trace ended with code {code}; the rank's log may say why"
        return said

    def wait(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class TraceRecording:
    def __init__(
        self, engine: Any, device: torch.device, rank: int, request: SnapshotRequest, stem: Path
    ) -> None:
        self._recorder = TraceRecorder(engine.module, device)
        self._stem = stem
        self._raw = stem.with_name(f".{stem.name}.raw.json")
        self._steps = request.steps
        self._step = 0

    def start(self, step: int) -> None:
        self._step = step
        self._recorder.start()

    def phase(self, phase: Phase) -> AbstractContextManager[Any]:
        return self._recorder.phase(phase)

    def phase_ended(self, phase: Phase) -> None:
        """Nothing: the trace goes on."""

    def finish(self, reading: StepReading) -> Writing:
        self._recorder.stop()
        try:
            self._recorder.write(self._raw)
        except BaseException:
            self._raw.unlink(missing_ok=True)
            raise
        given = [str(self._raw), str(self._stem), str(self._step), str(self._steps)]
        return _ByProcess(
            # -P: a script's own folder may have modules of the names that the process imports.
            [sys.executable, "-P", "-m", reduce.__name__, *given],
            (reduce.summary_path(self._stem), reduce.trace_path(self._stem)),
        )

    def abandon(self) -> None:
        self._recorder.abandon()


class ModulesRecording:
    def __init__(
        self, engine: Any, device: torch.device, rank: int, request: SnapshotRequest, stem: Path
    ) -> None:
        self._watch = ModuleWatch(engine.module, device)
        self._rank = rank
        self._path = stem.with_name(f"{stem.name}.json")
        self._step = 0

    def start(self, step: int) -> None:
        self._step = step
        self._watch.start()

    def phase(self, phase: Phase) -> AbstractContextManager[Any]:
        return self._watch.forward() if phase == "forward" else nullcontext()

    def phase_ended(self, phase: Phase) -> None:
        """Nothing: the step goes on."""

    def finish(self, reading: StepReading) -> Writing:
        rows = self._watch.stop()
        table = ModuleTable(
            rank=self._rank,
            step=self._step,
            step_seconds=reading.times.step_seconds() if reading.times else 0.0,
            rows=rows,
        )
        return _Written(write_json(self._path, table))

    def abandon(self) -> None:
        self._watch.abandon()


def _cuts_recomputations_of_shards(engine: Any) -> bool:
    """Whether recomputations that stop early gather weights in shards, as far as Hugging Face's layers tell:
    those of the reentrant kind run to their end."""
    stage = getattr(engine, "zero_optimization_stage", None)
    if stage is None or stage() != 3:
        return False
    return any(recomputes(one) and not is_reentrant(one) for one in engine.module.modules())


class StateRecording:
    """The allocator's blocks at the end of the last forward pass, which holds all activations; with stacks at
    the end of the step, with all that happened in it."""

    def __init__(
        self, engine: Any, device: torch.device, rank: int, request: SnapshotRequest, stem: Path
    ) -> None:
        if device.type != "cuda":
            raise ValueError("there is no CUDA allocator on the CPU kind")
        if request.with_stacks and _cuts_recomputations_of_shards(engine):
            raise ValueError(f"{STACKS_END_IT}: take it without stacks")
        # Where CUDA is not, none of this is needed.
        from llmtop.profiler.probes import snapshotmemory

        self._memory = snapshotmemory
        self._engine = engine
        self._device = device
        self._rank = rank
        self._with_stacks = request.with_stacks
        self._recording = ExitStack()
        self._stem = stem
        self._step = 0
        self._written: _Written | None = None

    def start(self, step: int) -> None:
        self._step = step
        if self._with_stacks:
            self._recording.enter_context(self._memory.stacks_recorded())

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        yield

    def phase_ended(self, phase: Phase) -> None:
        if phase == "forward" and not self._with_stacks and self._written is None:
            self._written = self._write()

    def finish(self, reading: StepReading) -> Writing:
        if self._written is None:
            self._written = self._write()
        self._recording.close()
        return self._written

    def abandon(self) -> None:
        self._recording.close()

    def _write(self) -> _Written:
        found = self._memory.snapshot()
        table = self._memory.reduced(
            self._engine, found, device=self._device, rank=self._rank, step=self._step
        )
        summary = write_json(self._stem.with_name(f"{self._stem.name}.summary.json"), table)
        pickled = self._stem.with_name(f"{self._stem.name}.pickle")
        self._memory.write_pickle(found, pickled)
        return _Written(summary, pickled)


def write_json(path: Path, value: object) -> Path:
    write_atomic(path, document(value), lasting=False)
    return path


MAKERS: dict[SnapshotKind, Callable[[Any, torch.device, int, SnapshotRequest, Path], Recording]] = {
    "state": StateRecording,
    "trace": TraceRecording,
    "modules": ModulesRecording,
}

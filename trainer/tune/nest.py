"""Starts runs from a process that has their libraries loaded, so that each costs a fork and not the imports.

with Nest(spec, log, say) as nest:
    nest.wait_ready()
    run = nest.start(other_spec, root)
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from msgspec import Struct

from llmtop.presets.errors import JobFailedError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.record.processidentity import process_identity
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.units import format_seconds
from llmtop.trainer.launch import start_run, start_supervisor, wait_until_supervised
from llmtop.trainer.supervisor.rankenv import WORKER_COMMAND, threads_of
from llmtop.trainer.toolchain import mended, torch_cuda

_LOAD_SECONDS = 180.0
"""For a slow disk."""
_ANSWER_SECONDS = 30.0
_POLL_SECONDS = 0.1
PARENT_ENVIRONMENT = {
    # Counting devices must not initialize CUDA, nor may compilers be started ahead of time.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TORCH_WARM_POOL": "0",
}
"""For a process that loads torch and is forked later."""


class Answer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the nest."""

    loaded_seconds: float | None = None
    """It is ready, after so long."""
    problem: str = ""
    """Why it cannot be used."""
    pid: int = 0
    """Of the supervisor that was asked for."""


class Nest:
    """One nest and the runs that it starts. Where it cannot, they start as ever, and `say` is told why."""

    def __init__(self, spec: RunSpec, log: Path, say: Callable[[str], None]) -> None:
        self._say = say
        self._log = log
        self._unread = b""
        self._spec = spec
        # Another command than the worker is for tests, and has to be started.
        self._usable = WORKER_COMMAND not in os.environ
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Until its libraries are loaded, or it has said that it cannot be used."""
        if not self._usable:
            return
        try:
            self._process = self._open()
            self._write(msgspec.json.encode(self._spec))
            answer = self._answer(_LOAD_SECONDS)
            if answer.problem:
                raise _unusable(answer.problem, self._log)
        except JobFailedError as error:
            self._give_up(error)
        else:
            self._say(f"libraries loaded once for all trials, in {format_seconds(answer.loaded_seconds)}")

    def start(self, spec: RunSpec, root: Path) -> RunDir:
        """Launch a run; raises as `start_run`."""
        return start_run(spec, predict(spec), root=root, supervise=self._supervise)

    def close(self) -> None:
        """The runs that it has started go on."""
        process, self._process = self._process, None
        self._usable = False
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        # It holds nothing but libraries.
        process.kill()
        process.wait()

    def _supervise(self, run: RunDir) -> int:
        if self._usable:
            try:
                return self._fork(run)
            except JobFailedError as error:
                self._give_up(error)
        return start_supervisor(run)

    def _fork(self, run: RunDir) -> int:
        self._write(os.fsencode(run.path.resolve()))
        pid = self._answer(_ANSWER_SECONDS).pid
        wait_until_supervised(run, pid, lambda: None if process_identity(pid) is not None else 1)
        return pid

    def _open(self) -> subprocess.Popen[bytes]:
        spec = self._spec
        environment = {
            **mended(os.environ, None if spec.on_cpu else torch_cuda()),
            **PARENT_ENVIRONMENT,
            "DS_ACCELERATOR": "cpu" if spec.on_cpu else "cuda",
            "OMP_NUM_THREADS": str(threads_of(spec, os.environ)),
            "TOKENIZERS_PARALLELISM": "false",
            "KINETO_LOG_LEVEL": "6",
            "PYTHONUNBUFFERED": "1",
        }
        try:
            with self._log.open("ab") as log:
                return subprocess.Popen(
                    [sys.executable, "-P", "-m", "llmtop.trainer.worker.nest"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise _unusable(error.strerror or str(error), self._log) from error

    def _give_up(self, error: JobFailedError) -> None:
        self.close()
        self._say(f"each trial loads its libraries itself: {error.in_one_line}")

    def _write(self, line: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise _unusable("it has ended", self._log) from error

    def _answer(self, seconds: float) -> Answer:
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            if time.monotonic() > deadline:
                raise _unusable(f"no word from it after {seconds:g} s", self._log)
            if select.select([descriptor], [], [], _POLL_SECONDS)[0]:
                piece = os.read(descriptor, 1 << 12)
                if not piece:
                    raise _unusable("it has ended", self._log)
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return msgspec.json.decode(line, type=Answer)


def _unusable(why: str, log: Path) -> JobFailedError:
    return JobFailedError(
        "the process that was to load them cannot be used", why=f"{why}; {log} may say more"
    )

"""Runs in fresh processes without their imports: starts a zygote and hands it one run after another.

with ForkServer(on_cpu=True) as server:
    server.run(run_dir, seconds=300)
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from benchmarks.preload import PRELOAD_SECONDS, PRELOADED
from benchmarks.zygote import WORKER, Answer, Order
from llmtop.presets.errors import JobFailedError
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.standby import TOUCHES_CUDA
from llmtop.trainer.tune.nest import PARENT_ENVIRONMENT

_POLL_SECONDS = 0.15
_LONGEST_IMPORT_SECONDS = 180.0
"""One import cannot be cut short: for a slow disk."""
_MOST_RESTARTS = 2
_LEAST_PRELOAD_SECONDS = 20.0
"""For a restart, however long the start before it took."""
_END_SECONDS = 20.0
_SILENT_SECONDS = 60.0
"""Beyond a run's own limit, after which the zygote ends it."""


class ForkServerError(JobFailedError):
    """The zygote failed, not what it was to run."""


class ForkServer:
    """A zygote and the runs that it has under way; `run` may be called from several threads.

    Made in the main thread: the zygote dies with the thread that started it.
    """

    def __init__(self, *, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        self._lock = threading.Lock()
        self._jobs = 0
        self._waiting: dict[int, queue.Queue[Answer]] = {}
        self.ready = ""
        """What loading took, in words."""
        began = time.monotonic()
        leave = [] if on_cpu else list(TOUCHES_CUDA)
        restarts = 0
        while touched := self._start(leave, began + PRELOAD_SECONDS - time.monotonic()):
            restarts += 1
            leave += left_after(touched, restarts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        run: RunDir,
        *,
        seconds: float,
        entry: str = WORKER,
        while_running: Callable[[dict[int, int]], None] = lambda pids: None,
    ) -> Answer:
        """Carry out a run and wait for its end. `while_running` is called a few times a second with rank
        to pid."""
        answers: queue.Queue[Answer] = queue.Queue()
        with self._lock:
            self._jobs += 1
            job = self._jobs
            self._waiting[job] = answers
            self._send(Order(job=job, run=str(run.path.resolve()), entry=entry, seconds=seconds))
        pids: dict[int, int] = {}
        latest = time.monotonic() + seconds + _SILENT_SECONDS
        while True:
            try:
                answer = answers.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                while_running(pids)
                if time.monotonic() > latest:
                    raise ForkServerError(
                        "the process that forks the ranks does not answer", fix="run with --supervised"
                    ) from None
                continue
            if answer.what == "broken":
                raise ForkServerError(
                    "the process that forks the ranks ended", why=answer.detail, fix="run with --supervised"
                )
            if answer.what == "ended":
                del self._waiting[job]
                return answer
            pids = answer.pids

    def close(self) -> None:
        """End the zygote and all that it has started."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            # The kernel ends its ranks with it.
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _start(self, leave: list[str], seconds: float) -> str:
        """Start a zygote; the module that spoilt it, or nothing when it is ready."""
        began = time.monotonic()
        seconds = max(_LEAST_PRELOAD_SECONDS, seconds)
        options = [*(["--leave", *leave] if leave else []), "--seconds", f"{seconds:.0f}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.zygote", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[1],
            env={
                **os.environ,
                **PARENT_ENVIRONMENT,
                "DS_ACCELERATOR": "cpu" if self._on_cpu else "cuda",
                "TOKENIZERS_PARALLELISM": "false",
            },
            start_new_session=True,
        )
        first: queue.Queue[Answer] = queue.Queue()
        self._waiting[-1] = first
        self._reader = threading.Thread(target=self._read, name="answers of the zygote")
        self._reader.start()
        try:
            answer = first.get(timeout=_LONGEST_IMPORT_SECONDS)
        except queue.Empty:
            answer = Answer(what="broken", detail=f"no word after {_LONGEST_IMPORT_SECONDS:g} s")
        if answer.what == "ready":
            self.ready = f"ready to fork after {time.monotonic() - began:.1f} s, imports {answer.detail}"
            return ""
        self.close()
        if answer.what == "touched":
            return answer.detail
        raise ForkServerError("the process that forks the ranks did not start", why=answer.detail)

    def _send(self, order: Order) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ForkServerError("the process that forks the ranks is gone") from error

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = msgspec.json.decode(line, type=Answer)
            self._waiting[answer.job].put(answer)
        broken = Answer(what="broken", detail="its own output says why")
        for answers in list(self._waiting.values()):
            answers.put(broken)


def left_after(touched: str, restarts: int) -> list[str]:
    """What a spoilt zygote's successor leaves to the ranks: at first only the module that touched CUDA, in
    the end all that it had not loaded before, so that the next start is sure to be the last."""
    if restarts < _MOST_RESTARTS:
        return [touched]
    return list(PRELOADED[PRELOADED.index(touched) :])

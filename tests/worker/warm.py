"""Ranks of tests that are forked from a process with their libraries loaded: `python -m tests.worker.warm`.

A rank spends five seconds of a processor on its imports and a tenth of one on what most tests look at. Here
each costs a fork. Tests of the start itself, and of a process's memory, start theirs as a supervisor does.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

from llmtop.trainer.pdeath import die_with_parent

_ROOT = Path(__file__).parents[2]
_TURN_SECONDS = 0.05
_BEGIN_SECONDS = 240.0
"""Of the first rank, before which all libraries are loaded."""
_PIECE_BYTES = 1 << 16
_LATE = (
    "deepspeed.ops.adam",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "accelerate",
    "peft",
    "bitsandbytes.optim",
)
"""What the first engine of some tests would import."""


class Order(Struct, frozen=True, kw_only=True):
    """A Python process, as a command would start it."""

    words: tuple[str, ...]
    """What follows the interpreter."""
    environment: dict[str, str]
    log: str


class Answer(Struct, frozen=True, kw_only=True):
    pid: int
    code: int | None = None
    """How it ended, as `subprocess` counts; None where it has begun."""


# --- the side of the tests ------------------------------------------------------------------------------


class ForkedRank:
    """As much of a `Popen` as tests of ranks need."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self._warm = warm
        self.pid = pid

    def poll(self) -> int | None:
        return self._warm.code_of(self.pid)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"forked rank {self.pid}", timeout)
            self._warm.listen(_TURN_SECONDS)
        return code

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Warm:
    """The process with the libraries, and what was forked from it. It ends with this one."""

    def __init__(
        self,
        command: Sequence[str] = (sys.executable, "-m", "tests.worker.warm"),
        begin_seconds: float = _BEGIN_SECONDS,
    ) -> None:
        self._begin_seconds = begin_seconds
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        self._unread = b""
        self._begun: list[int] = []
        self._codes: dict[int, int] = {}

    def start(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedRank:
        order = Order(words=tuple(words), environment=dict(environment), log=str(log))
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + self._begin_seconds
        while not self._begun:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the process that forks ranks", self._begin_seconds)
            self.listen(_TURN_SECONDS)
        return ForkedRank(self, self._begun.pop())

    def code_of(self, pid: int) -> int | None:
        self.listen(0.0)
        return self._codes.get(pid)

    def listen(self, seconds: float) -> None:
        """Take what has come, and wait for so long where nothing has."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        if not select.select([descriptor], [], [], seconds)[0]:
            return
        piece = os.read(descriptor, _PIECE_BYTES)
        if not piece:
            raise RuntimeError("the process that forks ranks has ended; what it said is above")
        *lines, self._unread = (self._unread + piece).split(b"\n")
        for line in lines:
            answer = msgspec.json.decode(line, type=Answer)
            if answer.code is None:
                self._begun.append(answer.pid)
                # One that ended long ago may have had its number.
                self._codes.pop(answer.pid, None)
            else:
                self._codes[answer.pid] = answer.code

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@cache
def warm() -> Warm:
    """The one of this process."""
    made = Warm()
    atexit.register(made.close)
    return made


# --- the process itself ---------------------------------------------------------------------------------


def load() -> None:
    from importlib import import_module

    from llmtop.trainer.worker.nest import load as load_for
    from tests.worker.launching import tiny_spec

    load_for(tiny_spec())
    for name in ("llmtop.trainer.worker.session", *_LATE):
        import_module(name)


def serve(orders: int, answers: int) -> None:
    """Until the orders end. One thread: a fork copies only the one that makes it."""
    unread, open_ = b"", True
    while open_:
        if select.select([orders], [], [], _TURN_SECONDS)[0]:
            piece = os.read(orders, _PIECE_BYTES)
            open_ = bool(piece)
            *lines, unread = (unread + piece).split(b"\n")
            for line in lines:
                tell(answers, Answer(pid=fork(msgspec.json.decode(line, type=Order), (orders, answers))))
        for answer in ended():
            tell(answers, answer)


def tell(answers: int, answer: Answer) -> None:
    os.write(answers, msgspec.json.encode(answer) + b"\n")


def ended() -> list[Answer]:
    found = []
    with suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(Answer(pid=one[0], code=os.waitstatus_to_exitcode(one[1])))
    return found


def fork(order: Order, close: tuple[int, ...]) -> int:
    from llmtop.trainer.worker.forking import end_after

    pid = os.fork()
    if pid == 0:
        for descriptor in close:
            os.close(descriptor)
        end_after(lambda: become(order))
    return pid


def become(order: Order) -> int:
    """What the words say; its exit code."""
    from llmtop.trainer.worker.seats import redirect

    die_with_parent()
    # What this process's libraries do at an exit is not the copy's to do, should it run exit functions.
    atexit._clear()
    os.environ.clear()
    os.environ.update(order.environment)
    redirect(Path(order.log))
    try:
        if order.words[0] == "-m":
            sys.argv = list(order.words[1:])
            runpy.run_module(order.words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(order.words)
            sys.path.insert(0, str(Path(order.words[0]).parent))
            runpy.run_path(order.words[0], run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code
        return code if isinstance(code, int) else int(code is not None)
    return 0


def main() -> None:
    die_with_parent()
    orders, answers = os.dup(0), os.dup(1)
    # What libraries print must not get between the answers.
    os.dup2(2, 1)
    load()
    gc.collect()
    gc.freeze()
    serve(orders, answers)


if __name__ == "__main__":
    main()

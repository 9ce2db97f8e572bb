"""Forks ranks that have their libraries loaded: `python -m benchmarks.zygote [--leave MODULE ...]`.

A fresh run spends 16 to 20 s on imports. This process imports them once, without touching CUDA (a context
does not survive a fork), and then makes each rank of each run by forking: a process of its own session,
with the environment that the supervisor would give it, that dies with this one.

Orders come on stdin and answers go to stdout, one JSON object a line; it ends when stdin does. Like the
supervisor it writes `supervisor.jsonl` of each run, by the same rules, so that the run reads like any other.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.preload import PRELOAD_SECONDS, preload
from llmtop.presets.version import llmtop_version
from llmtop.profiler.hardware.processes import descendants
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import RankStarted, RunStarted
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.trainer.pdeath import die_with_parent
from llmtop.trainer.supervisor.extensions import extensions_dir, remove_stale_locks
from llmtop.trainer.supervisor.postmortem import Story, name_end
from llmtop.trainer.supervisor.progress import Progress
from llmtop.trainer.supervisor.rankenv import free_port, rank_environment
from llmtop.trainer.supervisor.ranks import RankExit, adopt_orphans, signal_name
from llmtop.trainer.worker.forking import end_after, forget_nvml, let_torchao_in, restart_nvml
from llmtop.trainer.worker.seats import redirect

WORKER = "llmtop.trainer.worker.__main__:main"
_PEER_SECONDS = 15.0
"""How long the other ranks may outlive one that failed."""
_TURN_SECONDS = 0.05


class Order(Struct, frozen=True, kw_only=True):
    """One run to be made."""

    job: int
    run: str
    """Its folder."""
    entry: str = WORKER
    """What each rank calls with the run's folder as its one argument."""
    seconds: float = 300.0
    """After this long the ranks are killed."""


class Answer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    what: str
    """`ready`, `touched`, `started`, `ended` or `broken`."""
    job: int = -1
    pids: dict[int, int] = {}
    detail: str = ""
    """Of `ended` the run's state, else words."""
    cut_after_seconds: float | None = None
    """Of `ended`: the order's limit, where nothing but that ended the run."""


class _Run:
    """The ranks of one run, from their start to their last event."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.run_dir = RunDir.open(Path(order.run))
        self.world_size = self.run_dir.spec().world_size
        self.progress = Progress(self.run_dir, self.world_size)
        self.events = EventWriter(self.run_dir.events_path(SUPERVISOR), SUPERVISOR)
        self.alive: dict[int, int] = {}
        self.exits: list[RankExit] = []
        self.killed: set[int] = set()
        self.waited_for = ""
        self.out_of_time = False
        self.deadline = time.monotonic() + order.seconds

    def start(self, close: tuple[int, ...]) -> dict[int, int]:
        """Fork every rank; rank to pid."""
        run = self.run_dir
        run.write_supervisor_pid()
        self.events.write(
            RunStarted(
                run_id=run.run_id,
                name=run.spec().name,
                pid=os.getpid(),
                host=socket.gethostname(),
                world_size=self.world_size,
                llmtop_version=llmtop_version(),
            )
        )
        extensions = extensions_dir(os.environ)
        extensions.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_stale_locks(extensions)
        port = free_port()
        for rank in range(self.world_size):
            environment = rank_environment(
                run, rank, port=port, extensions=extensions, environment=os.environ
            )
            pid = os.fork()
            if pid == 0:
                work = partial(_become_rank, self.order, environment, run.log_path(rank), close)
                end_after(work)
            self.alive[rank] = pid
            self.events.write(RankStarted(rank=rank, pid=pid))
        return dict(self.alive)

    def note_exit(self, pid: int, status: int) -> bool:
        """Whether the process that ended was a rank of this run."""
        rank = next((rank for rank, known in self.alive.items() if known == pid), None)
        if rank is None:
            return False
        del self.alive[rank]
        by_signal = os.WIFSIGNALED(status)
        exit_ = RankExit(
            rank=rank,
            pid=pid,
            exit_code=None if by_signal else os.WEXITSTATUS(status),
            signal=signal_name(os.WTERMSIG(status)) if by_signal else None,
            seen_at=time.time(),
        )
        self.exits.append(exit_)
        self.events.write(exit_.event)
        # What it may have left behind; its own number may belong to another process by now.
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if exit_.exit_code != 0:
            self.deadline = min(self.deadline, time.monotonic() + _PEER_SECONDS)
        return True

    def lose_patience(self) -> None:
        if not self.alive or time.monotonic() < self.deadline:
            return
        if not self.killed:
            # Decided once: those that are killed now end one after the other, and are no reason.
            failed = any(exit_.exit_code != 0 for exit_ in self.exits)
            self.out_of_time = not failed
            late = f"did not finish within {self.order.seconds:g} s"
            self.waited_for = "could not go on without the others" if failed else late
        self.killed.update(self.alive)
        self.kill()

    def kill(self) -> None:
        for pid in self.alive.values():
            _kill_session(pid)

    def end(self) -> Answer:
        """Write the last event, and what is answered."""
        self.progress.poll()
        ended = name_end(
            Story(
                world_size=self.world_size,
                exits=tuple(self.exits),
                finished=self.progress.finished,
                failed=self.progress.failed,
                killed=frozenset(self.killed),
                waited_for=self.waited_for,
                last_step=self.progress.last_step,
                stepped=self.progress.stepped,
                logs={rank: self.run_dir.log_path(rank) for rank in range(self.world_size)},
            )
        )
        self.events.write(ended)
        self.events.close()
        return Answer(
            what="ended",
            job=self.order.job,
            detail=ended.state,
            cut_after_seconds=self.order.seconds if self.out_of_time and not self.progress.failed else None,
        )


class Zygote:
    """Takes orders, forks, reaps, answers. One thread: the kernel ends the ranks with the one that forked."""

    def __init__(self, orders: int, answers: int) -> None:
        self._orders = orders
        self._answers = answers
        self._unread = b""
        self._runs: list[_Run] = []

    def answer(self, answer: Answer) -> None:
        os.write(self._answers, msgspec.json.encode(answer) + b"\n")

    def serve(self) -> None:
        """Until stdin ends. Whatever happens, no rank is left."""
        try:
            open_ = True
            while open_ or self._runs:
                ready, _, _ = select.select([self._orders] if open_ else [], [], [], _TURN_SECONDS)
                if ready:
                    open_ = self._read_orders()
                    if not open_:
                        self._kill_all()
                self._reap()
        finally:
            self._kill_all()

    def _read_orders(self) -> bool:
        piece = os.read(self._orders, 1 << 16)
        *lines, self._unread = (self._unread + piece).split(b"\n")
        for line in filter(None, lines):
            order = msgspec.json.decode(line, type=Order)
            run = _Run(order)
            self._runs.append(run)
            pids = run.start((self._orders, self._answers))
            self.answer(Answer(what="started", job=order.job, pids=pids))
        return bool(piece)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            any(run.note_exit(pid, status) for run in self._runs)
        for run in list(self._runs):
            run.lose_patience()
            if not run.alive:
                self._runs.remove(run)
                self.answer(run.end())

    def _kill_all(self) -> None:
        for run in self._runs:
            run.kill()
        me = os.getpid()
        for pid in descendants([me])[me][1:]:
            _kill_session(pid)


def _become_rank(order: Order, environment: dict[str, str], log: Path, close: tuple[int, ...]) -> int:
    """In the child: from here on it is a rank like one that the supervisor starts."""
    os.setsid()
    os.environ.update(environment)
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    redirect(log)
    for descriptor in close:
        os.close(descriptor)
    restart_nvml()
    module, _, function = order.entry.partition(":")
    getattr(importlib.import_module(module), function)([order.run])
    return 0


def _kill_session(pid: int) -> None:
    """A rank leads a session and a process group of its own, which hold what it has started."""
    for end in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--leave", nargs="*", default=[], help="modules that the ranks import themselves")
    parser.add_argument("--seconds", type=float, default=PRELOAD_SECONDS, help="no import begins after that")
    options = parser.parse_args()
    die_with_parent()
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print must not get between the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    zygote = Zygote(os.dup(0), answers)
    let_torchao_in(False)
    loaded = preload(frozenset(options.leave), options.seconds)
    if loaded.touched:
        sys.stderr.write(f"not ready after {loaded.words}\n")
        zygote.answer(Answer(what="touched", detail=loaded.touched))
        return
    forget_nvml()
    # Collected objects of the parent would be written to, and so copied, in every rank.
    gc.collect()
    gc.freeze()
    zygote.answer(Answer(what="ready", detail=loaded.words))
    zygote.serve()


if __name__ == "__main__":
    main()

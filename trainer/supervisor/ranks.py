"""Starts the ranks of a run as processes of their own, notices their ends, and leaves none behind."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.hardware.processes import descendants
from llmtop.profiler.record.events import RankExited
from llmtop.profiler.record.logmarks import mark_new_process
from llmtop.trainer.supervisor.scarcity import is_scarcity

_PR_SET_CHILD_SUBREAPER = 36
_SWEEP_SECONDS = 10.0
_SWEEP_PAUSE_SECONDS = 0.02


class RankExit(Struct, frozen=True, kw_only=True):
    """How one rank's process ended."""

    rank: int
    pid: int
    exit_code: int | None = None
    """None when a signal ended it."""
    signal: str | None = None
    """Name, as SIGKILL."""
    seen_at: float = 0.0
    """Wall clock."""

    @property
    def event(self) -> RankExited:
        return RankExited(rank=self.rank, pid=self.pid, exit_code=self.exit_code, signal=self.signal)


def adopt_orphans() -> None:
    """Make this process the parent of all that its descendants leave behind, so that it can find them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


class Ranks:
    """The ranks that this process started.

    Needs `adopt_orphans`, and that nothing else in this process waits for children.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._pids: dict[int, int] = {}
        self._standby: dict[int, int] = {}
        self._wall = wall

    @property
    def alive(self) -> dict[int, int]:
        """Rank to pid of those whose end was not seen yet."""
        return dict(self._pids)

    @property
    def standby(self) -> dict[int, int]:
        """Rank to pid of those that were made ready for a relaunch and live."""
        return dict(self._standby)

    @property
    def standby_problem(self) -> str:
        """Why one of them lives no more, where more is told of that than its own log has."""
        return ""

    def take_standby(self) -> dict[int, int]:
        """Those that stood by are the ranks from now on."""
        self._pids, self._standby = self._standby, {}
        return dict(self._pids)

    def end_standby(self) -> None:
        """They have nothing to lose."""
        for pid in (*self._standby.values(), *self._below_standby()):
            _kill_if_there(pid)
        self._standby = {}

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        standby: bool = False,
    ) -> int:
        """Start one rank with its streams in its log; its pid. One that stands by is no rank yet.

        It stays in this session but leads a process group, so that what it starts can be signalled with it.
        """
        try:
            if not standby:  # the process before it still writes
                mark_new_process(log)
            pid = self._launch(command, environment, log)
        except OSError as error:
            raise LlmtopError(
                f"rank {rank} cannot be started",
                why=f"{command[0]}: {error.strerror}",
                fix="reinstall the environment that llmtop runs in",
            ) from error
        (self._standby if standby else self._pids)[rank] = pid
        return pid

    def _launch(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return os.posix_spawnp(
            command[0],
            list(command),
            dict(environment),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), write, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setpgroup=0,
            # Python ignores these for itself; a compiler must not inherit that.
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )

    def reap(self) -> list[RankExit]:
        """The ranks that ended since the last call. Adopted orphans that ended are cleared away."""
        exits: list[RankExit] = []
        ranks = {pid: rank for rank, pid in self._pids.items()}
        while True:
            try:
                status = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                break
            if status is None:
                break
            rank = ranks.get(status.si_pid)
            if rank is None:
                self._standby = {r: pid for r, pid in self._standby.items() if pid != status.si_pid}
                continue
            del self._pids[rank]
            by_itself = status.si_code == os.CLD_EXITED
            exits.append(
                RankExit(
                    rank=rank,
                    pid=status.si_pid,
                    exit_code=status.si_status if by_itself else None,
                    signal=None if by_itself else signal_name(status.si_status),
                    seen_at=self._wall(),
                )
            )
        return exits

    def signal(self, number: signal.Signals) -> None:
        """Signal the ranks themselves, not what they started: a compiler may finish its file."""
        for pid in self._pids.values():
            os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL for every rank and everything below this process."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self._seen_below() or ():
            _kill_if_there(pid)

    def sweep(self, timeout: float = _SWEEP_SECONDS) -> tuple[tuple[RankExit, ...], tuple[int, ...]]:
        """Kill until nothing is left below this process; the ranks that this ended, and pids that resist."""
        exits: list[RankExit] = []
        deadline = time.monotonic() + timeout
        while True:
            exits += self.reap()
            seen = self._seen_below()
            left = tuple(self._pids.values()) if seen is None else seen
            if (not left and seen is not None) or time.monotonic() >= deadline:
                # One that ended between the two looks is a zombie, which counts as gone.
                return (*exits, *self.reap()), left
            for pid in left:
                _kill_if_there(pid)
            time.sleep(_SWEEP_PAUSE_SECONDS)

    def _seen_below(self) -> tuple[int, ...] | None:
        """None where there is nothing to look with, for as long as that lasts."""
        try:
            return self._below()
        except OSError as error:
            if not is_scarcity(error):
                raise
            return None

    def _below(self) -> tuple[int, ...]:
        """Everything below this process but what stands by."""
        me = os.getpid()
        spared = {*self._standby.values(), *self._below_standby()}
        return tuple(pid for pid in descendants([me])[me][1:] if pid not in spared)

    def _below_standby(self) -> tuple[int, ...]:
        trees = descendants(self._standby.values()) if self._standby else {}
        return tuple(pid for tree in trees.values() for pid in tree[1:])


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kill_if_there(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return

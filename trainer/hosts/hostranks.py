"""The ranks of all hosts as one supervisor has them: started, signalled and waited for by orders."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable

from llmtop.profiler.record.events import RankExited, RankStarted
from llmtop.profiler.record.hostevents import StandbyEnded
from llmtop.profiler.record.hosts import Host
from llmtop.trainer.hosts import orders
from llmtop.trainer.hosts.members import Member, Members, Told
from llmtop.trainer.supervisor.ranks import RankExit, Ranks

_PAUSE_SECONDS = 0.05
_SWEEP_SECONDS = 30.0


class HostRanks(Ranks):
    """Pids are those of other machines: nothing here may look at a process of theirs."""

    def __init__(
        self,
        members: Members,
        write: Callable[[RankStarted], object],
        log: Callable[[str], None],
        wall: Callable[[], float] = time.time,
        started: Callable[[Host], Iterable[int]] = lambda host: host.ranks,
    ) -> None:
        """`started`: numbers under which a host starts processes."""
        super().__init__(wall)
        self._started = started
        self._members = members
        self._write = write
        self._log = log
        self._exits: list[RankExit] = []
        self.given_up: dict[str, str] = {}
        """Host to why its ranks are counted as ended."""
        self._standby_problem = ""

    def start_all(self, order: orders.StartRanks) -> None:
        """On every host."""
        numbers = {rank: 0 for member in self._members.all for rank in self._started(member.host)}
        if order.standby:
            self._standby, self._standby_problem = numbers, ""
        else:
            self._pids = numbers
            self.given_up = {}
        self._members.order(order)

    @property
    def standby_problem(self) -> str:
        """Of the host that was the first."""
        return self._standby_problem

    def take_all_standby(self) -> dict[Member, int]:
        """Those that stand by are the ranks from now on; the order's number for each host.

        Each host tells of its own; none of them begins before it is let go.
        """
        self._pids, self._standby = self._standby, {}
        return self._members.order(orders.TakeStandby())

    def end_standby(self) -> None:
        if self._standby:
            self._standby = {}
            self._members.order(orders.EndStandby())

    def reap(self) -> list[RankExit]:
        for told in self._members.poll():
            self._take(told)
        for member in self._members.all:
            if not member.at_work and member.name not in self.given_up:
                self._give_up(member)
        exits, self._exits = self._exits, []
        return exits

    def signal(self, number: signal.Signals) -> None:
        self._members.order(orders.SignalRanks(signal=int(number)))

    def kill(self) -> None:
        self._members.order(orders.KillRanks())

    def sweep(self, timeout: float = _SWEEP_SECONDS) -> tuple[tuple[RankExit, ...], tuple[int, ...]]:
        """As `Ranks.sweep`, without waiting for hosts that do not answer; each host tells what resists."""
        if self._pids:
            self.kill()
        exits = self.reap()
        deadline = time.monotonic() + timeout
        while self._of_hosts_that_answer() and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
            exits += self.reap()
        return tuple(exits), ()

    def _of_hosts_that_answer(self) -> bool:
        silent = {rank for member in self._members.lost for rank in member.host.ranks}
        return any(rank not in silent for rank in self._pids)

    def _take(self, told: Told) -> None:
        event = told.event
        if isinstance(event, RankStarted):
            if event.rank in self._pids:
                self._pids[event.rank] = event.pid
                self._write(RankStarted(rank=event.rank, pid=event.pid, setting=event.setting))
        elif isinstance(event, RankExited):
            if self._pids.pop(event.rank, None) is not None:
                self._exits.append(
                    RankExit(
                        rank=event.rank,
                        pid=event.pid,
                        exit_code=event.exit_code,
                        signal=event.signal,
                        seen_at=self._wall(),
                    )
                )
        elif isinstance(event, StandbyEnded):
            why = f"rank {event.rank} ended while it was made ready"
            self._lose_standby(told.member, why, [event.rank])
            if self._pids.get(event.rank) == 0:
                self._end_ranks_of(told.member, why)
        else:
            self._see_problem(told)

    def _see_problem(self, told: Told) -> None:
        problem = getattr(told.event, "problem", "")
        if problem:
            self._log(f"host {told.member.name}: {problem}")
            if any(self._pids.get(rank) == 0 for rank in told.member.host.ranks):
                self._end_ranks_of(told.member, problem)
            self._lose_standby(told.member, problem, told.member.host.ranks)

    def _give_up(self, member: Member) -> None:
        """Its ranks have ended, or nothing will ever be heard of them."""
        why = member.gone or (member.ended.reason if member.ended is not None else "")
        self._lose_standby(member, why, member.host.ranks)
        self._end_ranks_of(member, why)

    def _lose_standby(self, member: Member, why: str, ranks: Iterable[int]) -> None:
        lost = [rank for rank in ranks if self._standby.pop(rank, None) is not None]
        if lost and not self._standby_problem:
            self._standby_problem = f"host {member.name}: {why}"

    def give_up_silent(self) -> None:
        """Count the ranks of hosts that do not answer as ended: they are waited for no longer."""
        for member in self._members.lost:
            if member.name not in self.given_up:
                because = f" ({member.problem})" if member.problem else ""
                quiet = f"has not answered for {member.quiet_seconds:.0f} s{because}"
                self._end_ranks_of(member, member.gone or quiet)

    def _end_ranks_of(self, member: Member, why: str) -> None:
        self.given_up[member.name] = why
        for rank in member.host.ranks:
            pid = self._pids.pop(rank, None)
            if pid is not None:
                self._exits.append(RankExit(rank=rank, pid=pid, seen_at=self._wall()))

"""The hosts of a run as its lead has them: gathered, told what to do, and left with nothing there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.events import AnyEvent, RunEnded
from llmtop.profiler.record.hostevents import HostLeft
from llmtop.profiler.record.hosts import Host, Hosts
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.hosts import orders
from llmtop.trainer.hosts.beat import LeadBeat
from llmtop.trainer.hosts.gathering import Gathering
from llmtop.trainer.hosts.hostranks import HostRanks
from llmtop.trainer.hosts.members import STILL_LEAVING, Member, Members
from llmtop.trainer.hosts.openfiles import make_room
from llmtop.trainer.supervisor.patience import Graces
from llmtop.trainer.supervisor.ranks import RankExit

PAUSE_SECONDS = 0.05
_ANSWER_SECONDS = 30.0
_LEAVE_SECONDS = 30.0


class Crew:
    def __init__(
        self,
        run: RunDir,
        hosts: Hosts,
        write: Callable[[AnyEvent], object],
        log: Callable[[str], None],
        environment: Mapping[str, str],
        *,
        started: Callable[[Host], Iterable[int]] = lambda host: host.ranks,
    ) -> None:
        """`started`: numbers under which a host's supervisor starts processes; by default, a rank each."""
        self.hosts = hosts
        self.graces = Graces.from_environment(environment)
        make_room(len(hosts.hosts))
        self.members = Members((Member(run, host) for host in hosts.hosts), write, self.graces.host)
        self._member_of = {rank: member for member in self.members.all for rank in member.host.ranks}
        self.ranks = HostRanks(self.members, write, log, started=started)
        self._write, self._log = write, log
        self._beat = LeadBeat(run)
        self._gathering = Gathering(run, hosts, self.members, self._beat, environment)
        self._late_exits: list[RankExit] = []
        """Seen while something else was waited for."""

    def close(self) -> None:
        self.members.close()
        self._gathering.close()

    # --- gathering ------------------------------------------------------------------------------------

    def gather(self, stopped: Callable[[], bool]) -> bool:
        """Until all hosts are ready; False where `stopped` says so before. Raises as `Gathering`."""
        self._gathering.begin()
        while not self._gathering.complete():
            self.wait()
            if stopped():
                return False
        for joined in self._gathering.joined():
            self._write(joined)
        return True

    def start(self, setting: int, *, standby: bool = False) -> None:
        """What the hosts are to start, which meets at the first of them."""
        address, port = self._meeting_place()
        self.ranks.start_all(
            orders.StartRanks(setting=setting, master_address=address, master_port=port, standby=standby)
        )

    def _meeting_place(self) -> tuple[str, int]:
        """Address and port of the first host. Raises LlmtopError where it tells none."""
        first = self.members.all[0]
        about = first.about()
        address = self.hosts.master_address or (about.address if about is not None else "")
        if not address:
            raise LlmtopError(
                f"host {first.name} has no address that others could reach",
                why="its only network is its own",
                fix="name one: --master-addr",
            )
        numbers = self.members.order(orders.OfferPort(), [first])
        self.wait_for_answers(numbers)
        answer = first.answers.get(numbers[first]) if first in numbers else None
        if answer is not None and answer.port is not None:
            return address, answer.port
        why = first.gone or f"it has not answered for {first.quiet_seconds:.0f} s"
        raise LlmtopError(f"host {first.name} offers no port for the ranks to meet at", why=why)

    # --- while they are there -------------------------------------------------------------------------

    def turn(self) -> None:
        """To be called often: the hosts count on a sign of life."""
        self._beat.turn()

    def wait(self) -> None:
        """A moment, in which nothing that the hosts tell is lost."""
        self._beat.turn()
        self._late_exits += self.ranks.reap()
        self._gathering.turn()
        time.sleep(PAUSE_SECONDS)

    def wait_for_answers(self, numbers: dict[Member, int]) -> None:
        """Until every host that answers has carried out an order."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and any(
            number not in member.answers and member.at_work and member.answers_now
            for member, number in numbers.items()
        ):
            self._beat.turn()
            self._late_exits += self.ranks.reap()
            time.sleep(PAUSE_SECONDS)

    def take_late_exits(self) -> list[RankExit]:
        """Those that were seen while something was waited for."""
        late, self._late_exits = self._late_exits, []
        return late

    def ahead_seconds(self, rank: int) -> float:
        """How far the clock of a rank's host is ahead, as far as that is known and matters."""
        return self._member_of[rank].ahead_seconds

    def silent_host(self) -> tuple[Host, str] | None:
        """A host that was given up or does not answer, and why."""
        silent = {member.name: silence(member) for member in self.members.lost}
        name = next(iter([*self.ranks.given_up, *silent]), None)
        if name is None:
            return None
        host = self.hosts.host(name)
        assert host is not None
        return host, self.ranks.given_up.get(name) or silent[name]

    # --- the end --------------------------------------------------------------------------------------

    def leave(self, end: RunEnded) -> RunEnded:
        """Have every host end; the run's last words, with hosts that have not said that they did."""
        open_ = self._leave(end)
        if not open_:
            return end
        told = "; ".join(f"host {name}: {why}" for name, why in open_.items())
        reason = (
            f"{end.reason}; not every host answered: {told}. Such a host ends its ranks by itself when"
            f" it has not heard of this machine for {self.graces.host:g} s"
        )
        return msgspec.structs.replace(end, reason=reason)

    def _leave(self, end: RunEnded) -> dict[str, str]:
        try:
            self.members.order(orders.TidyStates(keep=True))
            self.members.order(orders.Leave(state=end.state, reason=end.reason, fix=end.fix))
            deadline = time.monotonic() + _LEAVE_SECONDS
            while self._still_leaving() and time.monotonic() < deadline:
                self.wait()
            while any(map(_is_on_its_way_out, self.members.all)) and time.monotonic() < deadline:
                self.wait()
            self._fetch_the_last(deadline)
        except OSError as error:
            self._log(f"the hosts cannot be told to leave: {error}")
        left: dict[str, str] = {}
        for member in self.members.all:
            is_leaving = _is_on_its_way_out(member)
            answered = member.ended is not None and not is_leaving
            was_there = member.ended is not None or not self._gathering.never_reached(member)
            told = member.ended.reason if member.ended is not None else silence(member)
            reason = STILL_LEAVING if is_leaving else told
            if was_there and not answered:
                left[member.name] = reason
            self._write(HostLeft(host=member.name, reason=reason, answered=answered, was_there=was_there))
        return left

    def _still_leaving(self) -> bool:
        return any(
            member.at_work and member.answers_now and self._may_leave(member) for member in self.members.all
        )

    def _may_leave(self, member: Member) -> bool:
        """Also one that a starter has called, of which nothing was heard yet: it reads its orders."""
        called = self.hosts.launcher != "ssh" and not self._gathering.never_reached(member)
        return called or _was_there(member)

    def _fetch_the_last(self, deadline: float) -> None:
        """What the hosts have written of their ranks may still be on its way."""
        ended = [m.transport for m in self.members.all if m.ended is not None and m.transport is not None]
        for transport in ended:
            transport.ask_for_all()
        while any(not transport.has_all for transport in ended) and time.monotonic() < deadline:
            self.wait()


def is_known(exit_: RankExit) -> bool:
    """Whether it was told how it ended: of a host that was given up nothing is known."""
    return exit_.exit_code is not None or exit_.signal is not None


def silence(member: Member) -> str:
    """Why a host is not heard of."""
    if member.gone:
        return member.gone
    if member.about() is None:
        return "was never there" + (f": {member.problem}" if member.problem else "")
    because = f" ({member.problem})" if member.problem else ""
    return f"has not answered for {member.quiet_seconds:.0f} s{because}"


def span(ranks: range) -> str:
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start} to {ranks.stop - 1}"


def _is_on_its_way_out(member: Member) -> bool:
    """Whether its supervisor has said its last and is still there, as far as it can be asked."""
    transport = member.transport
    return member.ended is not None and transport is not None and transport.supervisor_lives is True


def _was_there(member: Member) -> bool:
    """Also one that is just coming up: it leaves then."""
    started = member.transport.started_pid if member.transport is not None else None
    return started is not None or member.about() is not None

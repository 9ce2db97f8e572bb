"""The supervisor of a run over hosts: decides as that of one machine does, and has the hosts do it.

Its ranks are those of all hosts (`HostRanks`); what they tell comes as files (`transport`). It is started as
any supervisor is, by `python -m llmtop.trainer.supervise`, where the run has a `hosts.json`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.fleet.part import LeadPart
from llmtop.profiler.record.events import RunEnded
from llmtop.profiler.record.hostevents import HostLeft
from llmtop.profiler.record.hosts import Hosts, lead_beat_path, read_hosts
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotrequest import forget_snapshots
from llmtop.profiler.record.wholefile import random_hex, write_atomic
from llmtop.profiler.units import counted
from llmtop.trainer import control
from llmtop.trainer.change.restagefolder import remove_states
from llmtop.trainer.change.standby import let_go
from llmtop.trainer.hosts import orders
from llmtop.trainer.hosts.gathering import Gathering
from llmtop.trainer.hosts.hostranks import HostRanks
from llmtop.trainer.hosts.members import Member, Members
from llmtop.trainer.hosts.nohardware import NoHardware, NoOom
from llmtop.trainer.hosts.supervise import BEAT_SECONDS
from llmtop.trainer.supervise import Supervisor
from llmtop.trainer.supervisor.bookmarkwatch import BookmarkWatch
from llmtop.trainer.supervisor.changes import Changes
from llmtop.trainer.supervisor.lifeline import run_started
from llmtop.trainer.supervisor.patience import Graces
from llmtop.trainer.supervisor.postmortem import Story, follows_from_another
from llmtop.trainer.supervisor.ranks import RankExit, adopt_orphans
from llmtop.trainer.supervisor.thinwatch import ThinWatch

_ANSWER_SECONDS = 30.0
_MOST_RANKS_KEPT = 256
"""Of more ranks no bookmark is kept: all hosts are read from their summaries, one rank from its log."""
_LEAVE_SECONDS = 30.0
_PAUSE_SECONDS = 0.05


class Lead(Supervisor):
    def __init__(
        self, run: RunDir, log: Callable[[str], None], environment: Mapping[str, str] = os.environ
    ) -> None:
        hosts = read_hosts(run)
        if hosts is None:
            raise UsageError(f"{run.path} is not a run over hosts")
        self.hosts: Hosts = hosts
        self._log = log
        # Ahead of the base, which is given the ranks.
        self.members = Members(
            (Member(run, host) for host in hosts.hosts),
            lambda event: self.events.write(event),
            Graces.from_environment(environment).host,
        )
        self._host_ranks = HostRanks(self.members, lambda event: self.events.write(event), log)
        super().__init__(run, environment, ranks=self._host_ranks)
        self._hardware = NoHardware()
        self._oom = NoOom()
        own = LeadPart(run)
        # Each host keeps its ranks' logs below their bounds; what comes here has to stay as it came.
        self._thinning = ThinWatch(own, log)
        if self.spec.world_size > _MOST_RANKS_KEPT:
            self._bookmark = BookmarkWatch(own, log)
        self.changes = Changes(
            run,
            self.ranks,
            self._start_ranks,
            self.events.write,
            self._requests.answer,
            log,
            ready_seconds=self.graces.ready,
            remove_states=self._remove_states,
        )
        self._late_exits: list[RankExit] = []
        """Seen while something else was waited for."""
        self._beat = LeadBeat(run)
        self._gathering = Gathering(run, hosts, self.members, self._beat.mark, environment)

    def run(self) -> RunEnded:
        try:
            return super().run()
        finally:
            self.members.close()
            self._gathering.close()

    def _start(self) -> None:
        run = self.run_dir
        run.write_supervisor_pid()
        adopt_orphans()
        self.events.write(run_started(run, self.spec.name, self.spec.world_size))
        self.changes.recover()
        forget_snapshots(run)
        self.spec = run.spec()
        self._gathering.begin()
        while not self._gathering.complete():
            self._wait()
            if self._stopped_early():
                return
        for joined in self._gathering.joined():
            self.events.write(joined)
        self._start_ranks()

    def _stopped_early(self) -> bool:
        """Whether somebody stops the run while its hosts are waited for."""
        told = [signal.SIGTERM, signal.SIGINT]
        self.stop_asked = any(number in told for number in self._wakeup.wait(_PAUSE_SECONDS))
        for asked in self._requests.new():
            if isinstance(asked, control.Request) and asked.action == control.STOP:
                self._requests.answer(asked, "accepted")
                self._stops.append(asked)
                self.stop_asked = True
            else:
                self._requests.answer(asked, "refused", "the run is being started")
        return self.stop_asked

    def _wait(self) -> None:
        self._beat.turn()
        self._late_exits += self._host_ranks.reap()
        self._gathering.turn()
        time.sleep(_PAUSE_SECONDS)

    def _start_ranks(self, standby_setting: int | None = None) -> None:
        """All ranks, on the setting in force; or those of another one, to stand by."""
        setting = standby_setting if standby_setting is not None else self.run_dir.in_force().setting
        address, port = self._meeting_place()
        self._host_ranks.start_all(
            orders.StartRanks(
                setting=setting,
                master_address=address,
                master_port=port,
                standby=standby_setting is not None,
            )
        )

    def _let_standby_go(self) -> None:
        # A rank that fails at once must be one by then, so that its end is told as a rank's.
        self._wait_for_answers(self._host_ranks.take_all_standby())
        try:
            let_go(self.run_dir, self.run_dir.in_force().setting)
        except OSError as error:
            self._log(f"the ranks that stood by cannot be let go: {error}")
            self.ranks.kill()

    def _wait_for_answers(self, numbers: dict[Member, int]) -> None:
        """Until every host that answers has carried out an order."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and any(
            number not in member.answers and member.at_work and member.answers_now
            for member, number in numbers.items()
        ):
            self._beat.turn()
            # Exits that come meanwhile are not to be lost.
            self._late_exits += self._host_ranks.reap()
            time.sleep(_PAUSE_SECONDS)

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
        self._wait_for_answers(numbers)
        answer = first.answers.get(numbers[first]) if first in numbers else None
        if answer is not None and answer.port is not None:
            return address, answer.port
        why = first.gone or f"it has not answered for {first.quiet_seconds:.0f} s"
        raise LlmtopError(f"host {first.name} offers no port for the ranks to meet at", why=why)

    def _turn(self) -> None:
        self._beat.turn()
        self._note_late_exits()
        super()._turn()

    def _note_late_exits(self) -> None:
        late, self._late_exits = self._late_exits, []
        for exit_ in late:
            self._note_exit(exit_)

    def _write_exit(self, exit_: RankExit) -> None:
        """Of a host that was given up nothing is known."""
        if _is_known(exit_):
            super()._write_exit(exit_)

    def _refusal(self, asked: control.Request | control.NotARequest) -> str:
        refusal = super()._refusal(asked)
        lost = self.members.lost
        if refusal or not lost or not isinstance(asked, control.Request) or asked.action == control.STOP:
            return refusal
        return f"{_names(lost)} not answer now, and every host has to make the change; ask again later"

    def _lose_patience(self) -> None:
        super()._lose_patience()
        if self.patience.over:
            # Those that do not answer could not be told.
            self._host_ranks.give_up_silent()

    def _look_for_trouble(self) -> None:
        # Compilers are looked for on the hosts, not among this machine's processes.
        hangs = self._trouble.look(self.progress, (), waited_for=bool(self.patience.waiting_for))
        if hangs and self.changes.on_trial:
            self.patience.wait(0.0, "made no step after the relaunch")

    def _remove_states(self, run: RunDir) -> None:
        remove_states(run)
        self.members.order(orders.TidyStates())

    def _story(self) -> Story:
        story, saved = super()._story(), self.progress.checkpoint
        if self.stop_asked:
            # A host that does not answer is told of apart: it keeps no run from having stopped.
            known = tuple(exit_ for exit_ in story.exits if _is_known(exit_))
            unknown = {exit_.rank for exit_ in story.exits} - {exit_.rank for exit_ in known}
            story = replace(story, exits=known, killed=story.killed - unknown)
        if saved is None:
            return story
        # It may lie on the hosts alone.
        told = f"llmtop resume {self.run_dir.run_id} goes on after step {saved.step:,}"
        return replace(story, go_on=told)

    # --- the end --------------------------------------------------------------------------------------

    def _named_end(self) -> RunEnded:
        self._note_late_exits()
        self.progress.poll(all_ranks=True)
        end = super()._named_end()
        if end.state != "failed" or not follows_from_another(self._story(), end.rank):
            return end
        given_up = self._host_ranks.given_up
        silent = {member.name: _silence(member) for member in self.members.lost}
        name = next(iter([*given_up, *silent]), None)
        if name is None:
            return end
        host = self.hosts.host(name)
        assert host is not None
        why = given_up.get(name) or silent[name]
        # Of a rank that was never heard of again there is nothing to say.
        told = "" if end.rank in host.ranks else f". {end.reason}"
        return RunEnded(
            state="failed",
            reason=f"host {name}: {why}; its ranks are {_span(host.ranks)}, and the last step was"
            f" {self.progress.last_step}{told}",
            fix=f"look at the host and its network; {self._story().go_on}",
            rank=host.first_rank,
        )

    def _end(self) -> RunEnded:
        end = super()._end()
        open_ = self._leave(end)
        if not open_:
            return end
        told = "; ".join(f"host {name}: {why}" for name, why in open_.items())
        return replace(
            end,
            reason=f"{end.reason}; not every host answered: {told}. Such a host ends its ranks by itself when"
            f" it has not heard of this machine for {self.graces.host:g} s",
        )

    def _give_up(self, error: BaseException) -> None:
        reason = error.in_one_line if isinstance(error, LlmtopError) else f"the lead failed: {error}"
        self._leave(RunEnded(state="failed", reason=reason))
        self._note_late_exits()
        self._requests.close(self._stops, reason)
        super()._give_up(error)

    def _leave(self, end: RunEnded) -> dict[str, str]:
        """Have every host end; those that were there and have not said that they did, and why."""
        try:
            self.members.order(orders.TidyStates(keep=True))
            self.members.order(orders.Leave(state=end.state, reason=end.reason, fix=end.fix))
            deadline = time.monotonic() + _LEAVE_SECONDS
            while self._still_leaving() and time.monotonic() < deadline:
                self._wait()
            self._fetch_the_last(deadline)
        except OSError as error:
            self._log(f"the hosts cannot be told to leave: {error}")
        left: dict[str, str] = {}
        for member in self.members.all:
            answered = member.ended is not None
            was_there = answered or not self._gathering.never_reached(member)
            reason = member.ended.reason if member.ended is not None else _silence(member)
            if was_there and not answered:
                left[member.name] = reason
            self.events.write(
                HostLeft(host=member.name, reason=reason, answered=answered, was_there=was_there)
            )
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
            self._wait()


def _is_known(exit_: RankExit) -> bool:
    return exit_.exit_code is not None or exit_.signal is not None


class LeadBeat:
    """A sign of life for the hosts, and a mark by which one knows this folder."""

    def __init__(self, run: RunDir) -> None:
        self._path: Path = lead_beat_path(run)
        self.mark = random_hex(16)
        self._due = 0.0
        self._number = 0

    def turn(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + BEAT_SECONDS
        self._number += 1
        with suppress(OSError):  # a full disk: the next one may have room
            beat = {"mark": self.mark, "n": self._number}
            write_atomic(self._path, msgspec.json.encode(beat), lasting=False)


def _was_there(member: Member) -> bool:
    """Also one that is just coming up: it leaves then."""
    started = member.transport.started_pid if member.transport is not None else None
    return started is not None or member.about() is not None


def _silence(member: Member) -> str:
    if member.gone:
        return member.gone
    if member.about() is None:
        return "was never there" + (f": {member.problem}" if member.problem else "")
    because = f" ({member.problem})" if member.problem else ""
    return f"has not answered for {member.quiet_seconds:.0f} s{because}"


def _names(members: tuple[Member, ...]) -> str:
    names = ", ".join(member.name for member in members[:4])
    more = f" and {counted(len(members) - 4, 'more')}" if len(members) > 4 else ""
    return f"host {names} does" if len(members) == 1 else f"hosts {names}{more} do"


def _span(ranks: range) -> str:
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start} to {ranks.stop - 1}"

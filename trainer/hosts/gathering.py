"""From a list of hosts to hosts that are ready for ranks: reached, their supervisors up, looked at, alike."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.record.hostabout import HostAbout, forget_about
from llmtop.profiler.record.hostevents import HostJoined
from llmtop.profiler.record.hosts import Hosts
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.profiler.units import counted
from llmtop.trainer.hosts.beat import LeadBeat
from llmtop.trainer.hosts.members import Member, Members
from llmtop.trainer.hosts.starters import Starter, make_starter
from llmtop.trainer.hosts.transport import InFolder, OverSsh
from llmtop.trainer.hosts.versions import require_alike
from llmtop.trainer.supervisor.patience import Graces
from llmtop.trainer.supervisor.postmortem import last_line

_MOST_TOLD = 6


class Gathering:
    def __init__(
        self, run: RunDir, hosts: Hosts, members: Members, beat: LeadBeat, environment: Mapping[str, str]
    ) -> None:
        self._run = run
        self._hosts = hosts
        self._members = members
        self._beat = beat
        self._variables = {name: environment[name] for name in hosts.variables if name in environment}
        self._starter: Starter | None = None
        self._graces = Graces.from_environment(environment)
        self._began = time.monotonic()
        self._ready: dict[Member, HostAbout] = {}

    def begin(self) -> None:
        """Reach out for every host. Raises LlmtopError where that cannot even be tried."""
        self._began = time.monotonic()
        for member in self._members.all:
            forget_about(member.dir)
            if self._hosts.launcher == "ssh":
                member.transport = OverSsh(
                    self._run,
                    member.host,
                    self._hosts,
                    mark=self._beat.mark,
                    begin=member.orders.begins_at,
                    folder=str(Path.cwd()),
                    variables=self._variables,
                )
            else:
                member.transport = InFolder(self._run, member.host, self._beat)
            member.transport.start()
        if self._hosts.launcher != "ssh":
            begins = [member.orders.begins_at for member in self._members.all]
            self._starter = make_starter(self._run, self._hosts, begins, self._variables)

    def turn(self) -> None:
        for member in self._members.all:
            if isinstance(member.transport, OverSsh):
                member.transport.start_supervisor()

    def complete(self) -> bool:
        """Whether all hosts are ready. Raises LlmtopError naming those that never will be."""
        waiting = [member for member in self._members.all if member not in self._ready]
        failed = {}
        for member in waiting:
            about = self._about(member)
            if about is not None:
                self._ready[member] = about
                continue
            why = self._failure(member)
            if why:
                failed[member.name] = why
        if failed:
            told = "; ".join(f"{name}: {why}" for name, why in list(failed.items())[:_MOST_TOLD])
            more = f"; and {counted(len(failed) - _MOST_TOLD, 'more')}" if len(failed) > _MOST_TOLD else ""
            raise LlmtopError(
                f"{counted(len(failed), 'host')} of {len(self._members.all)} cannot be used: {told}{more}",
                fix=self._fix(failed),
            )
        if len(self._ready) < len(self._members.all):
            return False
        self._require_fit()
        return True

    def _about(self, member: Member) -> HostAbout | None:
        if not isinstance(member.transport, OverSsh):
            return member.about()
        pid = member.transport.started_pid
        return member.about(pid) if pid is not None else None

    def _failure(self, member: Member) -> str:
        transport, waited = member.transport, time.monotonic() - self._began
        assert transport is not None
        if self._starter is not None and (told := self._starter.problem(member.name)):
            return told if "; it says: " in told else told + self._last_words(member)
        if transport.dead and transport.has_all:
            return f"{transport.dead}{self._last_words(member)}"
        if isinstance(transport, OverSsh) and not transport.link.about and waited > self._graces.connect:
            return f"cannot be reached: {transport.problem or 'ssh says nothing'}"
        late = waited > self._graces.ready
        return f"was not ready after {self._graces.ready:g} s{self._last_words(member)}" if late else ""

    def _fix(self, failed: Mapping[str, str]) -> str:
        """With no other host there is nothing to leave them out of."""
        if len(failed) < len(self._members.all):
            return "mend them, or leave them out: --exclude"
        if self._hosts.launcher != "ssh":
            return f"look at what {self._hosts.launcher} says, and mend it"
        return f"mend it; this has to work by hand, without a question: ssh {next(iter(failed))} true"

    def never_reached(self, member: Member) -> bool:
        """Whether nothing of the run can be on a host: nothing was heard of it, or nothing could start it.

        One that a starter which has ended did bring up, and that is slow, reads in its orders to leave.
        """
        if isinstance(member.transport, OverSsh):
            return not member.transport.link.about
        return member.about() is None and (self._starter is None or bool(self._starter.problem(member.name)))

    def _last_words(self, member: Member) -> str:
        said = last_line(member.dir.log_path(SUPERVISOR))
        return f"; it says: {said}" if said else ""

    def _require_fit(self) -> None:
        in_order = {member.name: self._ready[member] for member in self._members.all}
        unfit = {name: about for name, about in in_order.items() if about.problem}
        if unfit:
            name, about = next(iter(unfit.items()))
            others = f" (and {counted(len(unfit) - 1, 'other')})" if len(unfit) > 1 else ""
            raise UsageError(f"host {name}{others}: {about.problem}", fix=about.fix)
        require_alike({name: about.versions for name, about in in_order.items()})

    def joined(self) -> list[HostJoined]:
        return [
            HostJoined(
                host=member.name,
                pid=about.pid,
                first_rank=member.host.first_rank,
                ranks=len(member.host.slots),
                node=about.node,
            )
            for member, about in ((member, self._ready[member]) for member in self._members.all)
        ]

    def close(self) -> None:
        """Every host has left, or nobody waits for it."""
        if self._starter is not None:
            self._starter.close()

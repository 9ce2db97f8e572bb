"""The supervisor of a run over hosts: decides as that of one machine does, and has the hosts do it.

Its ranks are those of all hosts (`HostRanks`); what they tell comes as files (`transport`). It is started as
any supervisor is, by `python -m llmtop.trainer.supervise`, where the run has a `hosts.json`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.fleet.part import LeadPart
from llmtop.profiler.record.events import RunEnded
from llmtop.profiler.record.hosts import read_hosts
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotrequest import forget_snapshots
from llmtop.profiler.units import counted
from llmtop.trainer import control
from llmtop.trainer.change.keys import GPUS_OF_HOSTS
from llmtop.trainer.change.restagefolder import remove_states
from llmtop.trainer.change.standby import let_go
from llmtop.trainer.hosts import orders
from llmtop.trainer.hosts.crew import PAUSE_SECONDS, Crew, is_known, span
from llmtop.trainer.hosts.members import Member
from llmtop.trainer.hosts.nohardware import NoHardware, NoOom
from llmtop.trainer.supervise import Supervisor
from llmtop.trainer.supervisor.bookmarkwatch import BookmarkWatch
from llmtop.trainer.supervisor.changes import Changes
from llmtop.trainer.supervisor.lifeline import run_started
from llmtop.trainer.supervisor.postmortem import Story, follows_from_another
from llmtop.trainer.supervisor.progress import Progress
from llmtop.trainer.supervisor.ranks import RankExit, adopt_orphans
from llmtop.trainer.supervisor.thinwatch import ThinWatch

_MOST_RANKS_KEPT = 256
"""Of more ranks no bookmark is kept: all hosts are read from their summaries, one rank from its log."""


class Lead(Supervisor):
    def __init__(
        self, run: RunDir, log: Callable[[str], None], environment: Mapping[str, str] = os.environ
    ) -> None:
        hosts = read_hosts(run)
        if hosts is None:
            raise UsageError(f"{run.path} is not a run over hosts")
        self.hosts = hosts
        self._log = log
        # Ahead of the base, which is given the ranks.
        self.crew = Crew(run, hosts, lambda event: self.events.write(event), log, environment)
        super().__init__(run, environment, ranks=self.crew.ranks)
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

    def run(self) -> RunEnded:
        try:
            return super().run()
        finally:
            self.crew.close()

    def _start(self) -> None:
        run = self.run_dir
        run.write_supervisor_pid()
        adopt_orphans()
        self.events.write(run_started(run, self.spec.name, self.spec.world_size))
        self.changes.recover(self._requests.earlier)
        forget_snapshots(run)
        self.spec = run.spec()
        if self.crew.gather(self._stopped_early):
            self._start_ranks()

    def _stopped_early(self) -> bool:
        """Whether somebody stops the run while its hosts are waited for."""
        told = [signal.SIGTERM, signal.SIGINT]
        self.stop_asked = any(number in told for number in self._wakeup.wait(PAUSE_SECONDS))
        for asked in self._requests.new():
            if isinstance(asked, control.Request) and asked.action == control.STOP:
                self._requests.answer(asked, "accepted")
                self._stops.append(asked)
                self.stop_asked = True
            else:
                self._requests.answer(asked, "refused", "the run is being started")
        return self.stop_asked

    def _new_progress(self, last_step: int = 0) -> Progress:
        """In this machine's time, so that what happened first on any host is told from what followed."""
        return Progress(
            self.run_dir, self.spec.world_size, last_step=last_step, ahead_seconds=self.crew.ahead_seconds
        )

    def _start_ranks(self, standby_setting: int | None = None) -> None:
        """All ranks, on the setting in force; or those of another one, to stand by."""
        setting = standby_setting if standby_setting is not None else self.run_dir.in_force().setting
        self.crew.start(setting, standby=standby_setting is not None)

    def _let_standby_go(self) -> None:
        # A rank that fails at once must be one by then, so that its end is told as a rank's.
        self.crew.wait_for_answers(self.crew.ranks.take_all_standby())
        try:
            let_go(self.run_dir, self.run_dir.in_force().setting)
        except OSError as error:
            self._log(f"the ranks that stood by cannot be let go: {error}")
            self.ranks.kill()

    def _turn(self) -> None:
        self.crew.turn()
        self._note_late_exits()
        super()._turn()

    def _note_late_exits(self) -> None:
        for exit_ in self.crew.take_late_exits():
            self._note_exit(exit_)

    def _write_exit(self, exit_: RankExit) -> None:
        """Of a host that was given up nothing is known."""
        if is_known(exit_):
            super()._write_exit(exit_)

    def _refusal(self, asked: control.Request | control.NotARequest) -> str:
        refusal = super()._refusal(asked) or _changes_gpus(asked)
        if refusal or not isinstance(asked, control.Request) or asked.action == control.STOP:
            return refusal
        if lost := self.crew.members.lost:
            return f"{_names(lost)} not answer now, and every host has to make the change; ask again later"
        unable = next((one for one in self.crew.members.all if one.unable), None)
        return f"host {unable.name} takes no change now ({unable.unable}); ask again later" if unable else ""

    def _lose_patience(self) -> None:
        super()._lose_patience()
        if self.patience.over:
            # Those that do not answer could not be told.
            self.crew.ranks.give_up_silent()

    def _look_for_trouble(self) -> None:
        # Compilers are looked for on the hosts, not among this machine's processes.
        hangs = self._trouble.look(self.progress, (), waited_for=bool(self.patience.waiting_for))
        if hangs and self.changes.on_trial:
            self.patience.wait(0.0, "made no step after the relaunch")

    def _remove_states(self, run: RunDir) -> None:
        remove_states(run)
        self.crew.members.order(orders.TidyStates())

    def _story(self) -> Story:
        story, saved = super()._story(), self.progress.checkpoint
        if self.stop_asked:
            # A host that does not answer is told of apart: it keeps no run from having stopped.
            known = tuple(exit_ for exit_ in story.exits if is_known(exit_))
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
        if end.state == "stopped" and not self.stop_asked and (why := self._left_by_itself()):
            # Its ranks were told to stop there: nobody has asked for it here.
            fix = f"look at the network between; {self._story().go_on}"
            return RunEnded(state="failed", reason=f"{why}. {end.reason}", fix=fix)
        if end.state != "failed" or not follows_from_another(self._story(), end.rank):
            return end
        silent = self.crew.silent_host()
        if silent is None:
            return end
        host, why = silent
        # Of a rank that was never heard of again there is nothing to say.
        told = "" if end.rank in host.ranks else f". {end.reason}"
        return RunEnded(
            state="failed",
            reason=f"host {host.name}: {why}; its ranks are {span(host.ranks)}, and the last step was"
            f" {self.progress.last_step}{told}",
            fix=f"look at the host and its network; {self._story().go_on}",
            rank=host.first_rank,
        )

    def _left_by_itself(self) -> str:
        """Why a host has ended what it had before it was told to leave; empty where none has."""
        for member in self.crew.members.all:
            if member.ended is not None and member.ended.state == "failed":
                return f"host {member.name} ended its ranks: {member.ended.reason}"
        return ""

    def _end(self) -> RunEnded:
        return self.crew.leave(super()._end())

    def _give_up(self, error: BaseException) -> None:
        reason = error.in_one_line if isinstance(error, LlmtopError) else f"the lead failed: {error}"
        self.crew.leave(RunEnded(state="failed", reason=reason))
        self._note_late_exits()
        self._requests.close(self._stops, reason)
        super()._give_up(error)


def _names(members: tuple[Member, ...]) -> str:
    names = ", ".join(member.name for member in members[:4])
    more = f" and {counted(len(members) - 4, 'more')}" if len(members) > 4 else ""
    return f"host {names} does" if len(members) == 1 else f"hosts {names}{more} do"


def _changes_gpus(asked: control.Request | control.NotARequest) -> str:
    """Why that is refused: the hosts start what hosts.json says."""
    if not isinstance(asked, control.Request) or asked.action != control.SET:
        return ""
    try:
        words = control.set_params(asked).words
    except UsageError as error:
        return error.in_one_line
    return GPUS_OF_HOSTS if any(word.partition("=")[0].strip() == "gpus" for word in words) else ""

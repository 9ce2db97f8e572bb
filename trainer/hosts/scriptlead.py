"""The supervisor of a command of the user's own over hosts: watches as that of one machine does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.fleet.part import LeadPart
from llmtop.profiler.record.events import AnyEvent, RankStarted, RunEnded
from llmtop.profiler.record.hosts import read_hosts
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotrequest import forget_snapshots
from llmtop.trainer import control
from llmtop.trainer.hosts.crew import PAUSE_SECONDS, Crew, is_known, span
from llmtop.trainer.hosts.nohardware import NoHardware, NoOom
from llmtop.trainer.hosts.scriptcommand import kind_of, numbers
from llmtop.trainer.script.end import ScriptStory
from llmtop.trainer.script.supervisor import ScriptSupervisor
from llmtop.trainer.supervisor.lifeline import run_started
from llmtop.trainer.supervisor.patience import Patience
from llmtop.trainer.supervisor.ranks import RankExit, adopt_orphans
from llmtop.trainer.supervisor.thinwatch import ThinWatch


class ScriptLead(ScriptSupervisor):
    def __init__(
        self, run: RunDir, log: Callable[[str], None], environment: Mapping[str, str] = os.environ
    ) -> None:
        script, hosts = run.spec().script, read_hosts(run)
        if hosts is None or script is None:
            raise UsageError(f"{run.path} is no command over hosts")
        self._hosts = hosts
        crew = Crew(
            run,
            hosts,
            self._write,
            log,
            environment,
            started=lambda host: numbers(script.command, host),
        )
        self._crew, self._job = crew, JobOnHosts(crew, self._tell_exit)
        super().__init__(run, log, environment, job=self._job)
        self._peers = Patience(self._graces.kill)
        """With the others, once one has failed."""
        self._hardware = NoHardware()
        self._oom = NoOom()
        # Each host keeps its ranks' logs below their bounds; what comes here has to stay as it came.
        self._thinning = ThinWatch(LeadPart(run), log)

    def run(self) -> RunEnded:
        try:
            return super().run()
        finally:
            self._crew.close()

    def _write(self, event: AnyEvent) -> None:
        """A process of a launcher is no rank: those tell of themselves."""
        if not isinstance(event, RankStarted):
            self.events.write(event)

    def _tell_exit(self, exit_: RankExit) -> None:
        if is_known(exit_) and kind_of(self._script.command) == "python":
            self.events.write(exit_.event)

    def _start(self) -> None:
        run = self._run
        run.write_supervisor_pid()
        adopt_orphans()
        self.events.write(run_started(run, self._spec.name, self._hosts.world_size))
        forget_snapshots(run)
        if self._crew.gather(self._stopped_early):
            self._crew.start(run.in_force().setting)

    def _stopped_early(self) -> bool:
        """Whether somebody stops the run while its hosts are waited for."""
        told = any(number in (signal.SIGTERM, signal.SIGINT) for number in self._wakeup.wait(PAUSE_SECONDS))
        for asked in self._requests.new():
            if isinstance(asked, control.Request) and asked.action == control.STOP:
                self._requests.answer(asked, "accepted")
                self._stops.append(asked)
            else:
                self._requests.answer(asked, "refused", "the run is being started")
        if told:
            self._patience.wait(self._graces.script, "was told to end before it began")
        return told or bool(self._stops)

    def _turn(self) -> None:
        self._crew.turn()
        super()._turn()
        if self._job.failed is not None and not self._peers.waiting_for:
            # Launchers of other hosts do not know that ranks are gone.
            self._peers.wait(self._graces.peers, "the others of a command that failed")

    def _lose_patience(self) -> None:
        super()._lose_patience()
        action = self._peers.next_action()
        if action == "terminate":
            self._job.signal(signal.SIGTERM)
        elif action == "kill":
            self._job.kill()
        if self._patience.over or self._peers.over:
            # Those that do not answer could not be told.
            self._crew.ranks.give_up_silent()

    def _begin_stop(self) -> None:
        self._job.signal(signal.SIGTERM)
        self._patience.wait(self._graces.script, "did not stop in time")

    def _look_for_trouble(self) -> None:
        # Compilers are looked for on the hosts, not among this machine's processes.
        waited_for = bool(self._patience.waiting_for) or not self._progress.stepped
        self._trouble.look(self._progress, (), waited_for=waited_for)

    # --- its end ----------------------------------------------------------------------------------

    def _story(self) -> ScriptStory:
        outputs = {
            rank: rank if rank in numbers(self._script.command, host) else host.first_rank
            for host in self._hosts.hosts
            for rank in host.ranks
        }
        return replace(super()._story(), outputs=outputs)

    def _write_exit(self, exit_: RankExit) -> None:
        """Those of ranks were written as they came."""

    def _end(self) -> RunEnded:
        end = super()._end()
        silent = self._crew.silent_host()
        if end.state == "failed" and silent is not None and not self._progress.failed:
            host, why = silent
            end = RunEnded(
                state="failed",
                reason=f"host {host.name}: {why}; its ranks are {span(host.ranks)}, and the last step was"
                f" {self._progress.last_step}",
                fix="look at the host and its network, and start the command again",
                rank=host.first_rank,
            )
        return self._crew.leave(end)

    def _give_up(self, error: BaseException) -> None:
        reason = error.in_one_line if isinstance(error, LlmtopError) else f"the lead failed: {error}"
        self._crew.leave(RunEnded(state="failed", reason=reason))
        self._requests.close(self._stops, reason)
        super()._give_up(error)


class JobOnHosts:
    """The command's processes on all hosts."""

    def __init__(self, crew: Crew, tell: Callable[[RankExit], object]) -> None:
        self._crew, self._tell = crew, tell
        self.failed: RankExit | None = None
        """The first that ended otherwise than well: it stands for all."""

    @property
    def alive(self) -> dict[int, int]:
        """Pids are those of other machines."""
        return self._crew.ranks.alive

    def begin(self) -> None:
        """The hosts begin when all of them are there."""

    def reap(self) -> list[RankExit]:
        exits = [*self._crew.take_late_exits(), *self._crew.ranks.reap()]
        return [self._noted(exit_) for exit_ in exits]

    def _noted(self, exit_: RankExit) -> RankExit:
        self._tell(exit_)
        if exit_.exit_code != 0 and self.failed is None:
            self.failed = exit_
        return self.failed or exit_

    def signal(self, number: signal.Signals) -> None:
        self._crew.ranks.signal(number)

    def kill(self) -> None:
        self._crew.ranks.kill()

    def sweep(self) -> tuple[int, ...]:
        exits, left = self._crew.ranks.sweep()
        for exit_ in exits:
            self._noted(exit_)
        return left

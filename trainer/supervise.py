"""The supervisor of one run: `python -m llmtop.trainer.supervise RUNDIR`, in a session of its own.

Starts the ranks, samples the hardware, carries out requests, writes how the run ended, and leaves no
process behind. Only this process writes `supervisor.jsonl` and `hardware.jsonl`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from llmtop.presets.errors import ExitCode, LlmtopError, UsageError
from llmtop.profiler.record.events import RankStarted, RunEnded
from llmtop.profiler.record.hosts import read_hosts
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.profiler.record.snapshotrequest import forget_snapshots
from llmtop.trainer import control
from llmtop.trainer.change.standby import let_go
from llmtop.trainer.supervisor.bookmarkwatch import BookmarkWatch
from llmtop.trainer.supervisor.changes import Changes
from llmtop.trainer.supervisor.extensions import extensions_dir
from llmtop.trainer.supervisor.folderwatch import FolderWatch
from llmtop.trainer.supervisor.hardwarewatch import HardwareWatch
from llmtop.trainer.supervisor.healing import Healer
from llmtop.trainer.supervisor.hostmemory import HostMemoryWatch
from llmtop.trainer.supervisor.journal import Journal
from llmtop.trainer.supervisor.lifeline import run_started, supervisor_failed
from llmtop.trainer.supervisor.logline import log_line
from llmtop.trainer.supervisor.memoryend import MemoryFixes
from llmtop.trainer.supervisor.nvmetrial import report_nvme
from llmtop.trainer.supervisor.onlyone import only_supervisor
from llmtop.trainer.supervisor.oom import OomWatch
from llmtop.trainer.supervisor.patience import Graces, Patience
from llmtop.trainer.supervisor.postmortem import Story, and_go_on, how_to_go_on, name_end
from llmtop.trainer.supervisor.progress import Progress
from llmtop.trainer.supervisor.ranks import RankExit, Ranks, adopt_orphans
from llmtop.trainer.supervisor.requests import Requests
from llmtop.trainer.supervisor.scarcity import Scarcity
from llmtop.trainer.supervisor.snapshots import Snapshots
from llmtop.trainer.supervisor.starting import start_ranks
from llmtop.trainer.supervisor.thinwatch import ThinWatch
from llmtop.trainer.supervisor.trouble import Trouble
from llmtop.trainer.supervisor.wakeup import Wakeup

_TURN_SECONDS = 0.2
_STEPS_TO_STOP = 5


class Supervisor:
    def __init__(
        self, run: RunDir, environment: Mapping[str, str] = os.environ, ranks: Ranks | None = None
    ) -> None:
        self.run_dir = run
        self.spec = run.spec()
        self.environment = environment
        self.events = Journal(run.events_path(SUPERVISOR), SUPERVISOR, log=log_line)
        self.ranks = Ranks() if ranks is None else ranks
        self.progress = self._new_progress()
        self.graces = Graces.from_environment(environment)
        self.patience = Patience(self.graces.kill)
        self.exits: list[RankExit] = []
        """Of the ranks that were started last, as `killed`."""
        self.killed: set[int] = set()
        self._requests = Requests(run, self.events.write)
        self.changes = Changes(
            run,
            self.ranks,
            self._start_ranks,
            self.events.write,
            self._requests.answer,
            log_line,
            ready_seconds=self.graces.ready,
        )
        self.snapshots = Snapshots(run, self.events.write, self._requests.answer)
        self.stop_asked = False
        self.save_asked = False
        self._stops: list[control.Request] = []
        """Requests that are answered again when the run has ended."""
        self._trouble = Trouble(extensions_dir(environment), self.spec.options, self.events.write, log_line)
        self._oom = OomWatch()
        self._hardware = HardwareWatch(run, self.events.write, log_line, open_seconds=self.graces.driver)
        self._bookmark = BookmarkWatch(run, log_line)
        self._thinning = ThinWatch(run, log_line)
        self._folder = FolderWatch(run, self.graces.folder)
        self._memory = HostMemoryWatch(run, self.events.write, log_line)
        self._scarcity = Scarcity(log_line)
        self._healer = Healer(run, self.events.write, log_line)
        self._wakeup = Wakeup(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def run(self) -> RunEnded:
        """From the first event to the last. Whatever happens in between, no rank is left."""
        try:
            self._start()
            while self.ranks.alive or self._start_again():
                self._turn()
            end = self._end()
        except BaseException as error:
            self._give_up(error)
            raise
        self.events.write_last(end)
        self._hardware.finish()
        self._thinning.finish()
        return end

    def _start(self) -> None:
        run = self.run_dir
        run.write_supervisor_pid()
        adopt_orphans()
        self.events.write(run_started(run, self.spec.name, self.spec.world_size))
        self.changes.recover(self._requests.earlier)
        forget_snapshots(run)
        self.spec = run.spec()
        # Before the ranks, which would disturb it.
        report_nvme(run, self.spec, self.events.write, log_line)
        extensions = extensions_dir(self.environment)
        extensions.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._trouble.remove_stale_locks()
        self._start_ranks()
        # The first sample shows the machine before the ranks have taken anything.
        self._hardware.sample(self.ranks.alive)
        self._hardware.tell_topology()

    def _start_ranks(self, standby_setting: int | None = None) -> None:
        """All ranks, on the setting in force; or those of another one, to stand by."""
        standby = standby_setting is not None
        setting = standby_setting if standby_setting is not None else self.run_dir.in_force().setting
        start_ranks(self.run_dir, self.ranks, self.environment, self.events.write, setting, standby=standby)

    def _let_standby_go(self) -> None:
        setting = self.run_dir.in_force().setting
        try:
            let_go(self.run_dir, setting)
        except OSError as error:
            log_line(f"the ranks that stood by cannot be let go: {error}")
            self.ranks.end_standby()
            self._start_ranks()
            return
        for rank, pid in self.ranks.take_standby().items():
            self.events.write(RankStarted(rank=rank, pid=pid, setting=setting))

    def _start_again(self) -> bool:
        """Whether ranks were started in place of those that have ended, because the run was changed."""
        if self.stop_asked or not (self.changes.under_way or self.spec.options.heal):
            return False
        end = self._named_end()
        if not (self.changes.goes_on(self.progress, end) or self._heal(end)):
            return False
        self._take_options()
        self.exits, self.killed = [], set()
        self.patience = Patience(self.graces.kill)
        self.progress = self._new_progress(self.progress.last_step)
        self._memory = HostMemoryWatch(self.run_dir, self.events.write, log_line)
        self.snapshots.forget("the ranks were started again")
        if len(self.ranks.standby) == self.spec.world_size:
            self._let_standby_go()
        else:
            self.ranks.end_standby()
            self._start_ranks()
        return True

    def _new_progress(self, last_step: int = 0) -> Progress:
        """Of ranks that are yet to tell anything; `last_step` is that of those before."""
        return Progress(self.run_dir, self.spec.world_size, last_step=last_step)

    def _heal(self, end: RunEnded) -> bool:
        """Whether ranks that ran out of device memory are to be started again with half the micro-batch."""
        failure = self.progress.failed.get(end.rank) if end.rank is not None else None
        if not self.spec.options.heal or end.state != "out_of_memory" or failure is None or end.rank is None:
            return False
        why = self._healer.relaunch(failure, end.rank)
        if why:
            self.changes.relaunch(why)
        return bool(why)

    def _take_options(self) -> None:
        """Another setting is in force."""
        self.spec = self.run_dir.spec()
        self._trouble.take_options(self.spec.options)
        self._hardware.every_seconds = self.spec.options.sample_seconds

    def _turn(self) -> None:
        for number in self._wakeup.wait(_TURN_SECONDS):
            if number in (signal.SIGTERM, signal.SIGINT):
                self._told_to_end(number)
        exits = self.ranks.reap()
        self.progress.poll()
        for exit_ in exits:
            self._note_exit(exit_)
        if self.changes.poll(self.progress, self._hardware.host) or self._healer.poll(self.progress):
            self._take_options()
        self._lose_patience()
        with self._scarcity.forgiven():
            self._look_around()

    def _look_around(self) -> None:
        """What can be done at the next turn as well."""
        self.snapshots.poll(self.progress)
        self.events.flush()
        self._hardware.sample(self.ranks.alive)
        self._memory.see(self._hardware.newest, self.progress, self.spec)
        self._answer_requests()
        self._look_for_trouble()
        self._bookmark.turn()
        self._thinning.turn()
        if not self.stop_asked and self._folder.gone():
            self._begin_stop(save=False)

    # --- ranks ------------------------------------------------------------------------------------

    def _note_exit(self, exit_: RankExit) -> None:
        self.exits.append(exit_)
        self._write_exit(exit_)
        if exit_.exit_code == 0 and exit_.rank in self.progress.finished:
            self.patience.wait(self.graces.finish, "did not end with the others")
        else:
            self.patience.wait(self.graces.peers, "could not go on without the others")

    def _write_exit(self, exit_: RankExit) -> None:
        self.events.write(exit_.event)

    def _lose_patience(self) -> None:
        action = self.patience.next_action()
        if action is None or not self.ranks.alive:
            return
        self.killed.update(self.ranks.alive)
        if action == "terminate":
            self.ranks.signal(signal.SIGTERM)
        else:
            self.ranks.kill()

    def _named_end(self) -> RunEnded:
        """How the ranks have ended, once nothing is left below this process."""
        exits, left = self.ranks.sweep()
        for exit_ in exits:
            self._note_exit(exit_)
        if left:
            log_line(f"cannot end processes {', '.join(map(str, left))}")
        self.progress.poll()
        self.changes.poll(self.progress, self._hardware.host)
        self._hardware.tell_xids()
        return name_end(self._story())

    def _end(self) -> RunEnded:
        """What the last event says."""
        self.ranks.end_standby()
        end = self._named_end()
        kept = self.changes.close(end.reason)
        if end.state not in ("completed", "stopped"):
            end = replace(end, fix=self._with_kept(end.fix, kept))
        self.snapshots.poll(self.progress)
        self.snapshots.forget("the run has ended")
        self._hardware.tell_memory_return()
        self._requests.close(self._stops, end.reason)
        return end

    def _with_kept(self, fix: str, kept: str) -> str:
        """What to do after a run that was lost between two settings, if it was."""
        go_on = how_to_go_on(self.run_dir)
        if not kept:
            return and_go_on(fix, go_on)
        return "; ".join(filter(None, [fix, kept, "" if "llmtop resume" in fix else go_on]))

    def _story(self) -> Story:
        progress, fixes = self.progress, MemoryFixes(self.run_dir, log_line)
        return Story(
            world_size=self.spec.world_size,
            exits=tuple(self.exits),
            finished=progress.finished,
            failed=progress.failed,
            killed=frozenset(self.killed),
            waited_for=self.patience.waiting_for,
            stop_asked=self.stop_asked,
            save_asked=self.save_asked,
            checkpoint=progress.checkpoint,
            last_step=progress.last_step,
            stepped=progress.stepped,
            oom_evidence=self._oom.evidence(self._hardware.host, [exit_.pid for exit_ in self.exits]),
            host_fix=fixes.host,
            memory_bytes=self._hardware.rank_memory_bytes,
            xids=self._hardware.xids,
            lost_devices=self._hardware.lost_devices,
            device_fix=fixes.device,
            go_on=how_to_go_on(self.run_dir),
            logs={rank: self.run_dir.log_path(rank) for rank in range(self.spec.world_size)},
        )

    def _give_up(self, error: BaseException) -> None:
        """The supervisor itself failed: no rank may outlive it, and the record must say so."""
        self.ranks.end_standby()
        exits, _ = self.ranks.sweep()
        kept = self.changes.close("the supervisor failed")
        for exit_ in exits:
            self._write_exit(exit_)
        end = supervisor_failed(self.run_dir, error)
        self.events.write_last(replace(end, fix=self._with_kept(end.fix, kept)))

    # --- stopping ---------------------------------------------------------------------------------

    def _told_to_end(self, number: signal.Signals) -> None:
        """A first signal ends the run with a checkpoint, a second one at once."""
        log_line(f"received {number.name}")
        if not self.stop_asked:
            # Whether there is something to save they may have told since the last turn.
            self.progress.poll()
            self._begin_stop(save=True)
            return
        self.patience.wait(0.0, f"was still running at a second {number.name}")

    def _begin_stop(self, *, save: bool) -> None:
        self.stop_asked, self.save_asked = True, save
        self.ranks.signal(signal.SIGTERM if save else signal.SIGUSR1)
        if save and self.progress.stepped:
            steps_seconds = _STEPS_TO_STOP * (self.progress.median_step_seconds or 0.0)
            self.patience.wait(self.graces.save + steps_seconds, "did not stop in time")
        else:
            # Nothing can be lost but the step that they are in, which may be long.
            self.patience.wait(self.graces.stop, "did not stop in time", kill_seconds=self.graces.stop_kill)

    def _answer_requests(self) -> None:
        for asked in self._requests.new():
            # Whoever asks may have seen what the ranks have told since the turn began.
            self.progress.poll()
            refusal = self._refusal(asked)
            if refusal or isinstance(asked, control.NotARequest):
                self._requests.answer(asked, "refused", refusal)
            elif asked.action == control.SET:
                self.changes.take(asked, self.progress)
            elif asked.action == control.SNAPSHOT:
                self.snapshots.take(asked, self.spec, self.progress)
            else:
                self._requests.answer(asked, "accepted")
                self._stops.append(asked)
                self._begin_stop(save=asked.params.get("save") is True)

    def _refusal(self, asked: control.Request | control.NotARequest) -> str:
        """Why a request is not carried out; empty when it is."""
        if isinstance(asked, control.NotARequest):
            return asked.why
        if asked.action not in control.ACTIONS:
            return f"this version cannot {asked.action} a live run; it can: {', '.join(control.ACTIONS)}"
        if self.stop_asked:
            how = "with" if self.save_asked else "without"
            return f"the run is stopping already, {how} a checkpoint"
        if self.exits and not self.changes.leaving:
            return "the run is ending already"
        return ""

    # --- watching ---------------------------------------------------------------------------------

    def _look_for_trouble(self) -> None:
        hangs = self._trouble.look(
            self.progress, self.ranks.alive.values(), waited_for=bool(self.patience.waiting_for)
        )
        if hangs and self.changes.on_trial:
            # Nobody watches a relaunch that hangs, and there is a setting that works.
            self.patience.wait(0.0, "made no step after the relaunch")


def _supervise_script(run: RunDir) -> RunEnded:
    # It predicts, which the others leave to whoever launches: a tenth of a second of imports.
    if read_hosts(run) is not None:
        from llmtop.trainer.hosts.scriptlead import ScriptLead

        return ScriptLead(run, log_line).run()
    from llmtop.trainer.script.supervisor import ScriptSupervisor

    return ScriptSupervisor(run, log_line).run()


def _lead_hosts(run: RunDir) -> RunEnded:
    # Most runs have one machine.
    from llmtop.trainer.hosts.lead import Lead

    return Lead(run, log_line).run()


def main(arguments: list[str], ranks: Ranks | None = None) -> int:
    if len(arguments) != 1:
        raise UsageError("the supervisor takes one argument, the run directory")
    run = RunDir.open(Path(arguments[0]))
    with only_supervisor(run):
        if run.spec().script:
            end = _supervise_script(run)
        else:
            end = _lead_hosts(run) if read_hosts(run) else Supervisor(run, ranks=ranks).run()
        BookmarkWatch(run, log_line).finish()
    if end.state == "out_of_memory":
        return ExitCode.OUT_OF_MEMORY
    return ExitCode.JOB_FAILED if end.state == "failed" else ExitCode.DONE


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LlmtopError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)

"""Supervises a command of the user's own: starts it with the hook, follows its ranks, names its end.

The command starts its ranks itself (`deepspeed`, `torchrun`, `accelerate launch`, plain `python`), so the
only child is the command. Ranks make themselves known by the logs that the hook writes in their processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

from llmtop.presets.errors import LlmtopError
from llmtop.presets.resolve import Machine
from llmtop.profiler.hardware.aside import WAIT_SECONDS
from llmtop.profiler.hardware.machine import detect_machine
from llmtop.profiler.hardware.processes import ignores
from llmtop.profiler.memory.predict import predict_with_suggestions
from llmtop.profiler.record.events import RankStarted, RunEnded
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.profiler.record.scriptevents import DevicesFound, RankAttached, RunDescribed
from llmtop.profiler.record.snapshotrequest import forget_snapshots
from llmtop.trainer import control
from llmtop.trainer.script.describe import described, require_tokens
from llmtop.trainer.script.end import ScriptStory, name_script_end
from llmtop.trainer.script.follow import ScriptProgress
from llmtop.trainer.script.job import COMMAND, Job, job_of
from llmtop.trainer.script.unchangeable import UNCHANGEABLE
from llmtop.trainer.script.unseen import unseen_prediction, with_devices
from llmtop.trainer.supervisor.bookmarkwatch import BookmarkWatch
from llmtop.trainer.supervisor.folderwatch import FolderWatch
from llmtop.trainer.supervisor.hardwarewatch import HardwareWatch
from llmtop.trainer.supervisor.journal import Journal
from llmtop.trainer.supervisor.lifeline import run_started, supervisor_failed
from llmtop.trainer.supervisor.loaderdeath import dead_workers
from llmtop.trainer.supervisor.oom import OomWatch
from llmtop.trainer.supervisor.patience import Graces, Patience
from llmtop.trainer.supervisor.ranks import RankExit, adopt_orphans
from llmtop.trainer.supervisor.requests import Requests
from llmtop.trainer.supervisor.scarcity import Scarcity
from llmtop.trainer.supervisor.snapshots import Snapshots
from llmtop.trainer.supervisor.thinwatch import ThinWatch
from llmtop.trainer.supervisor.trouble import Trouble
from llmtop.trainer.supervisor.wakeup import Wakeup

_TURN_SECONDS = 0.2
_SNAPSHOT_LEAD_SECONDS = 2.0
"""Ranks of a script take no part in an agreement of ours; their steps are told a second late at most."""


class ScriptSupervisor:
    def __init__(
        self,
        run: RunDir,
        log: Callable[[str], None],
        environment: Mapping[str, str] = os.environ,
        *,
        job: Job | None = None,
    ) -> None:
        """`job`: the processes; by default those that the run's script means on this machine."""
        self._run = run
        self._spec = run.spec()
        if self._spec.script is None:
            raise ValueError(f"run {run.run_id} is no command of the user's own")
        self._script = self._spec.script
        self._log = log
        self.events = Journal(run.events_path(SUPERVISOR), SUPERVISOR, log=log)
        self._command = job_of(run, self._script, environment) if job is None else job
        self._progress = ScriptProgress(run)
        self._graces = Graces.from_environment(environment)
        self._patience = Patience(self._graces.kill)
        self._requests = Requests(run, self.events.write)
        self._stops: list[control.Request] = []
        self._snapshots = Snapshots(
            run, self.events.write, self._requests.answer, lead_seconds=_SNAPSHOT_LEAD_SECONDS
        )
        self._trouble = Trouble(None, self._spec.options, self.events.write, log)
        self._oom = OomWatch()
        # Where the launch has waited for the driver in vain, the command does not wait for it again.
        open_seconds = self._graces.driver if self._spec.knows("gpu") else 0.0
        self._hardware = HardwareWatch(run, self.events.write, log, open_seconds=open_seconds)
        self._bookmark = BookmarkWatch(run, log)
        self._thinning = ThinWatch(run, log)
        self._folder = FolderWatch(run, self._graces.folder)
        self._scarcity = Scarcity(log)
        self._exit: RankExit | None = None
        self._killed = False
        self._left = False
        """Told to look no more at what was only looked at."""
        self._started: set[int] = set()
        """Ranks that the record knows the process of."""
        self._describe_due = False
        """Whether what was seen waits for a driver that does not answer."""
        self._wakeup = Wakeup(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def run(self) -> RunEnded:
        """From the first event to the last. Whatever happens in between, nothing of the command is left."""
        try:
            self._start()
            while self._command.alive and not self._left:
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
        run = self._run
        run.write_supervisor_pid()
        adopt_orphans()
        # How many ranks there are, only they can tell.
        self.events.write(run_started(run, self._spec.name, 1))
        # The first sample shows the machine before the command has taken anything.
        self._hardware.sample({})
        self._hardware.tell_topology()
        forget_snapshots(run)
        self._command.begin()
        if self._script.pid is not None:
            # Until ranks tell of themselves it stands for them.
            self.events.write(RankStarted(rank=COMMAND, pid=self._script.pid))

    def _turn(self) -> None:
        for number in self._wakeup.wait(_TURN_SECONDS):
            if number in (signal.SIGTERM, signal.SIGINT):
                self._told_to_end(number)
        for exit_ in self._command.reap():
            self._exit = exit_
        self._lose_patience()
        with self._scarcity.forgiven():
            self._look_around()

    def _look_around(self) -> None:
        """What can be done at the next turn as well."""
        self._look_at_ranks()
        self.events.flush()
        self._hardware.sample(self._progress.pids or self._command.alive)
        self._answer_requests()
        self._snapshots.poll(self._progress)
        self._look_for_trouble()
        self._bookmark.turn()
        self._thinning.turn()
        if self._folder.gone() and not self._patience.waiting_for:
            self._begin_stop() if self._script.pid is None else self._stop_watching()

    # --- ranks ------------------------------------------------------------------------------------

    def _look_at_ranks(self) -> None:
        self._progress.poll()
        for rank, attached in sorted(self._progress.attached.items()):
            if rank not in self._started:
                self._started.add(rank)
                self.events.write(RankStarted(rank=rank, pid=attached.pid))
        if not self._spec.knows("gpu"):
            self._find_devices()
        if self._progress.take_news() or self._describe_due:
            self._describe()

    def _machine(self) -> Machine | None:
        """None while the driver does not answer: to wait for it would hold up a stop."""
        machine = None if self._hardware.driver_silent else detect_machine(open_seconds=WAIT_SECONDS)
        return None if machine is None or machine.driver_silent else machine

    def _find_devices(self) -> None:
        """What the launch would have told of the machine, had its driver answered then."""
        machine = self._machine()
        if machine is None:
            return
        spec, run = with_devices(self._spec, machine), self._run
        setting = run.add_setting(spec, unseen_prediction(), {})
        run.put_in_force(setting)
        self.events.write(DevicesFound(setting=setting))
        self._spec = spec

    def _describe(self) -> None:
        """What was seen of model, engine and batch becomes the run's spec, with a prediction."""
        attached, batch = self._progress.attached.get(0), self._progress.batch
        if attached is None:
            return
        if batch is None:
            self._tell_why_not(attached)
            return
        machine = self._machine()
        if machine is None or not self._spec.knows("gpu"):
            if not self._describe_due:
                self.events.write(RunDescribed(problem="the driver of the GPUs does not answer"))
            self._describe_due = True
            return
        self._describe_due = False
        try:
            spec = described(self._spec, attached, batch, machine, self._run.path / "model")
            prediction = predict_with_suggestions(spec)
        except LlmtopError as error:
            self.events.write(RunDescribed(problem=error.in_one_line))
            return
        setting = self._run.add_setting(spec, prediction, attached.deepspeed or {})
        self._run.put_in_force(setting)
        self.events.write(RunDescribed(setting=setting))

    def _tell_why_not(self, attached: RankAttached) -> None:
        """Of steps without a batch that could be counted, as soon as that is sure."""
        if not self._progress.stepped:
            return
        try:
            require_tokens(attached)
        except LlmtopError as error:
            self.events.write(RunDescribed(problem=error.in_one_line))

    def _look_for_trouble(self) -> None:
        # Before its first step a script may load and prepare for as long as it likes.
        waited_for = bool(self._patience.waiting_for) or not self._progress.stepped
        self._trouble.look(self._progress, self._command.alive.values(), waited_for=waited_for)

    # --- its end ----------------------------------------------------------------------------------

    def _end(self) -> RunEnded:
        left = self._command.sweep()
        if left:
            self._log(f"cannot end processes {', '.join(map(str, left))}")
        self._look_at_ranks()
        self._hardware.tell_xids()
        end = name_script_end(self._story())
        exit_ = self._exit
        if exit_ is not None:
            self._write_exit(exit_)
        if not self._left:
            self._hardware.tell_memory_return()
        self._snapshots.poll(self._progress)
        self._snapshots.forget("the run has ended")
        self._requests.close(self._stops, end.reason)
        return end

    def _write_exit(self, exit_: RankExit) -> None:
        """That of a rank: a launcher is none."""
        attached = self._progress.attached.get(COMMAND)
        if attached is None or attached.pid == exit_.pid:
            self.events.write(exit_.event)

    def _story(self) -> ScriptStory:
        failed = self._progress.failed
        workers = [pid for failure in failed.values() for pid in dead_workers(failure.message)]
        return ScriptStory(
            run=self._run,
            command=self._script.command,
            exit=self._exit,
            attached=self._progress.attached,
            finished=self._progress.finished,
            failed=failed,
            last_step=self._progress.last_step,
            stop_asked=bool(self._stops) or self._patience.waiting_for != "",
            killed=self._killed,
            left=self._left,
            oom_evidence=self._oom.evidence(
                self._hardware.host,
                [
                    *self._progress.pids.values(),
                    *([self._exit.pid] if self._exit is not None else []),
                    *workers,
                ],
            ),
            memory_bytes=self._hardware.rank_memory_bytes,
            xids=self._hardware.xids,
            lost_devices=self._hardware.lost_devices,
        )

    def _give_up(self, error: BaseException) -> None:
        """The supervisor itself failed: nothing may outlive it, and the record must say so."""
        self._command.sweep()
        self.events.write_last(supervisor_failed(self._run, error))

    # --- stopping ---------------------------------------------------------------------------------

    def _told_to_end(self, number: signal.Signals) -> None:
        """A first signal is passed on, a second one kills."""
        self._log(f"received {number.name}")
        if self._script.pid is not None:
            self._stop_watching()
            return
        if self._patience.waiting_for:
            self._patience.wait(0.0, f"was still running at a second {number.name}")
        else:
            # Ranks may have made themselves known since the last turn.
            with self._scarcity.forgiven():
                self._progress.poll()
            self._begin_stop()

    def _stop_watching(self) -> None:
        """What llmtop has not started it does not end."""
        self._left = True

    def _begin_stop(self) -> None:
        # Launchers pass it on to their ranks, as they do for whoever ends them by hand.
        self._command.signal(signal.SIGTERM)
        if any(ignores(pid, signal.SIGTERM) for pid in self._told_pids()):
            self._patience.wait(
                self._graces.stop, "did not stop in time", kill_seconds=self._graces.stop_kill
            )
        else:
            self._patience.wait(self._graces.script, "did not stop in time")

    def _told_pids(self) -> set[int]:
        """The command and the ranks that made themselves known: whoever should act on SIGTERM."""
        return {*self._command.alive.values(), *self._progress.pids.values()}

    def _lose_patience(self) -> None:
        action = self._patience.next_action()
        if action is None or not self._command.alive:
            return
        self._killed = True
        if action == "terminate":
            self._command.signal(signal.SIGTERM)
        else:
            self._command.kill()

    def _answer_requests(self) -> None:
        for asked in self._requests.new():
            # Whoever asks may have seen what the ranks have told since the turn began, which a prediction and
            # a driver can draw out.
            self._progress.poll()
            refusal = self._refusal(asked)
            if refusal or isinstance(asked, control.NotARequest):
                self._requests.answer(asked, "refused", refusal)
            elif asked.action == control.SNAPSHOT:
                self._snapshots.take(asked, self._run.spec(), self._progress, self._progress.world_size)
            else:
                self._requests.answer(asked, "accepted")
                self._stops.append(asked)
                self._stop_watching() if self._script.pid is not None else self._begin_stop()

    def _refusal(self, asked: control.Request | control.NotARequest) -> str:
        """Why a request is not carried out; empty when it is."""
        if isinstance(asked, control.NotARequest):
            return asked.why
        if asked.action == control.SNAPSHOT:
            return ""
        if asked.action != control.STOP:
            return UNCHANGEABLE
        if asked.params.get("save") is True:
            return f"{UNCHANGEABLE}; only it can save its state. Without --save it is sent SIGTERM"
        if self._stops:
            return "the run is stopping already"
        return ""

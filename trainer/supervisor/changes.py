"""Changes to a live run as the supervisor makes them: decided, handed to the ranks, followed to their end.

Between two steps the ranks change by themselves. For everything else they save and end, and are started on
the new setting; when that one does not come to its first step, they are started on the old one again.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Container
from pathlib import Path

from msgspec.structs import replace

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.record.changeevents import (
    ChangeRefused,
    RestageBegan,
    RestageFailed,
)
from llmtop.profiler.record.deviceevents import HostSample
from llmtop.profiler.record.events import Answer, AnyEvent, RunEnded
from llmtop.profiler.record.rundir import InForce, RunDir
from llmtop.trainer import control
from llmtop.trainer.change import restagefolder
from llmtop.trainer.change.livefile import LiveRequest, ask_ranks, forget_request
from llmtop.trainer.change.standby import count_ready
from llmtop.trainer.supervisor.leftover import settle_left
from llmtop.trainer.supervisor.patience import Graces
from llmtop.trainer.supervisor.progress import Progress
from llmtop.trainer.supervisor.ranks import Ranks
from llmtop.trainer.supervisor.relaunch import go_on_with, keep_in_words, restaged
from llmtop.trainer.supervisor.requests import Reply
from llmtop.trainer.supervisor.underway import Phase, UnderWay, change_asked, never_ready

_ROOM_SECONDS = 60.0
"""How long a run between two settings waits for room on a full disk."""
_ROOM_PAUSE_SECONDS = 0.2
_NOT_WRITTEN = "what the change needs cannot be written"
_NOT_READY = "the new setting failed while its ranks were made ready"
_READY_SECONDS = Graces().ready


class Changes:
    """Takes requests to change the run, and says when its ranks are to be started again."""

    def __init__(
        self,
        run: RunDir,
        ranks: Ranks,
        make_ready: Callable[[int], None],
        write: Callable[[AnyEvent], object],
        answer: Reply,
        log: Callable[[str], None],
        *,
        ready_seconds: float = _READY_SECONDS,
        remove_states: Callable[[RunDir], None] = restagefolder.remove_states,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ranks of a new setting have `ready_seconds` to load what they need, beside those that train."""
        self._run = run
        self._ranks = ranks
        self._make_ready = make_ready
        self._write = write
        self._answer = answer
        self._log = log
        self._ready_seconds = ready_seconds
        self._remove_states_of = remove_states
        self._wall = wall
        self._clock = clock
        self._now: UnderWay | None = None

    @property
    def under_way(self) -> bool:
        return self._now is not None

    @property
    def leaving(self) -> bool:
        """Whether ranks that end now do so because they were asked to, and not because the run ends."""
        return self._now is not None and self._now.phase is Phase.LEAVING

    @property
    def on_trial(self) -> bool:
        """Whether ranks were started for a change and have not all made a step."""
        return self._now is not None and self._now.phase in (Phase.TRIAL, Phase.BACK)

    def recover(self, earlier: Container[str] = ()) -> None:
        """Before the first ranks of a supervisor: what an earlier one left in the middle of a change.

        `earlier`: ids of the requests that there were then.
        """
        in_force = self._run.in_force()
        forget_request(self._run)
        for path in restagefolder.keep_states(self._run):
            self._log(f"an earlier supervisor left a state of the run, kept as {path}")
        self._take_back(in_force)
        settle_left(self._run, earlier, in_force, self._write, self._answer)
        # After the end of what was before it: in the record the last one that is told is in force.
        if in_force.ended_on is not None:
            self._now = go_on_with(self._run, in_force.setting, in_force.ended_on, self._write)

    def _take_back(self, in_force: InForce) -> None:
        if in_force.fall_back is None:
            return
        self._run.put_in_force(in_force.fall_back)
        self._write(
            RestageFailed(
                setting=in_force.setting,
                back_to=in_force.fall_back,
                reason="the supervisor ended before the new setting had made a step",
                world_size=self._run.spec().world_size,
            )
        )

    # --- taking a request -------------------------------------------------------------------------

    def take(self, asked: control.Request, progress: Progress) -> None:
        """Begin a change, or refuse it; either way it is answered and in the record."""
        words: tuple[str, ...] = ()
        try:
            params = control.set_params(asked)
            words = params.words
            self._begin(asked, params, progress)
        except (LlmtopError, OSError) as error:
            problem = error if isinstance(error, LlmtopError) else self._no_room(error)
            reason = problem.in_one_line
            if self._now is not None and self._now.request is asked:
                self._give_up_now(self._now, reason)
                return
            self._write(
                ChangeRefused(request_id=asked.request_id, asked=words, reason=reason, fix=problem.fix)
            )
            self._answer(asked, "refused", reason)

    def _no_room(self, error: OSError) -> LlmtopError:
        """Why the run's folder did not take what a change needs. That must not end a training."""
        return LlmtopError(
            _NOT_WRITTEN,
            why=error.strerror or str(error),
            fix=f"make {self._run.path} writable and free some space",
        )

    def _give_up_now(self, now: UnderWay, reason: str) -> None:
        """Refuse a change that was begun and has not reached the ranks that train."""
        self._now = None
        self._ranks.end_standby()
        self._refuse(now, reason)

    def _begin(self, asked: control.Request, params: control.SetParams, progress: Progress) -> None:
        # The prediction and the presets are a tenth of a second of imports that few runs need.
        from llmtop.profiler.hardware.hostmemory import host_memory_bytes
        from llmtop.trainer.change.plan import plan_change, require_fit
        from llmtop.trainer.change.price import price_of
        from llmtop.trainer.change.setwords import as_set_takes_it
        from llmtop.trainer.preflight import preflight

        if params.refusal:
            raise UsageError(params.refusal, fix=params.refusal_fix)
        if self._now is not None:
            raise UsageError(
                "another change is under way",
                why=self._now.phase.value,
                fix="ask again when it is done",
            )
        run, from_setting = self._run, self._run.in_force().setting
        plan = plan_change(
            run.spec(), run.prediction(), params.words, keep_global_batch=params.keep_global_batch
        )
        if not params.force:
            require_fit(plan, host_memory_bytes())
        if plan.restage:
            if not progress.stepped:
                raise UsageError(
                    "the run has not made a step yet",
                    why="a change that takes a relaunch needs a state to go on from",
                    fix="ask again after its first step",
                )
            with as_set_takes_it():
                preflight(plan.new, nvme_bytes=plan.new_prediction.nvme_bytes)
        price = price_of(plan, progress.stage_seconds, progress.checkpoint)
        setting = run.add_setting(plan.new, plan.new_prediction, plan.deepspeed_config)
        told = change_asked(
            setting, plan.changes, plan.old_prediction, plan.new_prediction, restage=plan.restage
        )
        self._write(
            replace(
                told,
                request_id=asked.request_id,
                expected_down_seconds=price.down_seconds,
                lost=plan.lost,
            )
        )
        self._answer(asked, "accepted", "")
        self._now = UnderWay(
            request=asked,
            setting=setting,
            from_setting=from_setting,
            phase=Phase.READYING if plan.restage else Phase.HOT,
            began=self._clock(),
            state_bytes=price.state_bytes,
        )
        if plan.restage:
            self._make_ready(setting)
        else:
            ask_ranks(run, LiveRequest(setting=setting))

    # --- following it -----------------------------------------------------------------------------

    def poll(self, progress: Progress, host: HostSample | None) -> bool:
        """Look at what the ranks have told; whether another setting has come into force between two steps."""
        now = self._now
        if now is None:
            return False
        if now.phase is Phase.READYING:
            # With no rank left that trains the run is ending, and that is what ends the change: see `close`.
            if self._ranks.alive:
                self._look_at_standby(now, host)
        elif now.phase in (Phase.HOT, Phase.LEAVING):
            told = [event for event in progress.applied.values() if event.setting == now.setting]
            if len(told) == progress.world_size:
                self._settle_told(now, next((event.problem for event in told if event.problem), ""))
        elif len(progress.first_steps) == progress.world_size:
            self._settle_launched(now, progress)
        return self._run.in_force().setting == now.setting and now.phase is Phase.HOT

    def _look_at_standby(self, now: UnderWay, host: HostSample | None) -> None:
        """Once all ranks of the new setting are ready, those that train save and end."""
        wanted = self._run.spec(now.setting).world_size
        if len(self._ranks.standby) < wanted:
            why = self._ranks.standby_problem
            self._give_up_now(now, f"{_NOT_READY}{f' ({why})' if why else ''}; the run was not touched")
        elif count_ready(self._run, now.setting) == wanted:
            try:
                folder = restagefolder.make_folder(self._run, now.state_bytes, host)
                ask_ranks(
                    self._run, LiveRequest(setting=now.setting, leave=True, folder=_told(self._run, folder))
                )
            except OSError as error:
                self._give_up_now(now, f"{_NOT_WRITTEN}: {error.strerror or error}")
                self._remove_states()
                return
            now.phase = Phase.LEAVING
        elif self._clock() - now.began > self._ready_seconds:
            ready = count_ready(self._run, now.setting)
            self._give_up_now(now, never_ready(ready, wanted, self._ready_seconds))

    def _settle_told(self, now: UnderWay, problem: str) -> None:
        """All ranks have made the change between two steps, or none."""
        if problem:
            self._give_up_now(now, problem)
            self._remove_states()
        elif self._put_in_force(now):
            self._now = None
            self._reply(now, "done")

    def _settle_launched(self, now: UnderWay, progress: Progress) -> None:
        """All ranks have made a step after a relaunch: what was kept for it has done its duty."""
        if now.phase is Phase.TRIAL and not self._put_in_force(now):
            return
        if now.phase is not Phase.BACK:
            self._write(restaged(now, progress))
        self._now = None
        self._remove_states()
        if now.phase is Phase.BACK:
            self._reply(now, "refused", f"{now.failure}; the run is back on its old setting")
        else:
            self._reply(now, "done")

    def _put_in_force(self, now: UnderWay) -> bool:
        """Whether the record says now what the ranks do; on a full disk it is tried again."""
        try:
            self._run.put_in_force(now.setting)
        except OSError as error:
            if not now.waits:
                self._log(f"setting {now.setting} waits to be written as the one in force: {error}")
            now.waits = True
            return False
        return True

    def _remove_states(self) -> None:
        """What cannot be removed stays, and the run goes on."""
        try:
            self._remove_states_of(self._run)
        except OSError as error:
            self._log(f"the state saved for the change cannot be removed: {error}")

    def _refuse(self, now: UnderWay, reason: str) -> None:
        if now.request is not None:
            words, asked = control.set_params(now.request).words, now.request.request_id
            self._write(ChangeRefused(request_id=asked, asked=words, reason=reason, setting=now.setting))
        self._reply(now, "refused", reason)

    def _reply(self, now: UnderWay, answer: Answer, reason: str = "") -> None:
        if now.request is not None:
            self._answer(now.request, answer, reason)

    # --- no rank is left --------------------------------------------------------------------------

    def goes_on(self, progress: Progress, end: RunEnded) -> bool:
        """Whether the ranks are to be started again, on the setting that is then in force."""
        now = self._now
        if now is None:
            return False
        if now.phase is Phase.LEAVING and end.state == "stopped":
            try:
                self._leave(now, progress)
            except OSError as error:
                # The setting in force is still the old one, and its state is saved.
                self._ranks.end_standby()
                now.phase = Phase.BACK
                now.failure = f"{_NOT_WRITTEN}: {error.strerror or error}"
                self._log(now.failure)
            return True
        if now.phase is Phase.TRIAL and end.state in ("failed", "out_of_memory"):
            self._fall_back(now, end)
            return True
        return False

    def _leave(self, now: UnderWay, progress: Progress) -> None:
        saved, last_step = progress.checkpoint, progress.finished[0].last_step
        self._run.put_in_force(now.setting, fall_back=now.from_setting)
        forget_request(self._run)
        now.phase = Phase.TRIAL
        now.last_step_at = progress.last_step_at
        now.saved = saved if saved is not None and saved.step == last_step else None
        now.relaunched_at = self._wall()
        self._write(
            RestageBegan(
                setting=now.setting,
                from_setting=now.from_setting,
                last_step=last_step,
                world_size=self._run.spec().world_size,
                save_seconds=now.saved.seconds if now.saved else None,
                saved_bytes=now.saved.size_bytes if now.saved else None,
                folder=saved.path if saved is not None else "",
            )
        )

    def _fall_back(self, now: UnderWay, end: RunEnded) -> None:
        now.phase = Phase.BACK
        now.failure = f"the new setting failed before its first step: {end.reason}"
        self._go_back(now)
        self._log(now.failure)
        self._write(
            RestageFailed(
                setting=now.setting,
                back_to=now.from_setting,
                reason=end.reason,
                world_size=self._run.spec().world_size,
            )
        )

    def _go_back(self, now: UnderWay) -> None:
        """Put the old setting in force; on a full disk once there is room, as no rank trains meanwhile."""
        deadline = time.monotonic() + _ROOM_SECONDS
        while True:
            try:
                self._run.put_in_force(now.from_setting)
                return
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise LlmtopError(
                        now.failure,
                        why=f"and the old one cannot be put in force: {error.strerror or error}",
                        fix="free some space; then this goes on from the state that was saved for the change:"
                        f" python -m llmtop.trainer.supervise {shlex.quote(str(self._run.path))}",
                    ) from error
            time.sleep(_ROOM_PAUSE_SECONDS)

    def relaunch(self, why: str) -> None:
        """The ranks have ended and are to be started again, on the setting that was put in force for that."""
        in_force = self._run.in_force()
        assert in_force.ended_on is not None
        forget_request(self._run)
        self._now = go_on_with(self._run, in_force.setting, in_force.ended_on, self._write, why)

    def close(self, reason: str) -> str:
        """The run has ended: no state of it stays in memory, and no request without an answer.

        In words where a state is kept that was saved for a change; empty where there is none.
        """
        now, self._now = self._now, None
        kept = keep_in_words(self._run, self._log)
        if now is not None and now.phase is Phase.BACK:
            self._reply(now, "refused", now.failure)
        elif now is not None and now.phase is Phase.RESUMED:
            # There is no other one to go back to: the run has ended on it.
            self._write(
                RestageFailed(
                    setting=now.setting,
                    back_to=now.setting,
                    reason=reason,
                    world_size=self._run.spec().world_size,
                )
            )
        elif now is not None:
            self._refuse(now, f"the run has ended before it was made: {reason}")
        return kept


def _told(run: RunDir, folder: Path) -> str:
    """A folder as the ranks are told of it: one below the run's from there on, as hosts have it elsewhere."""
    return str(folder.relative_to(run.path) if folder.is_relative_to(run.path) else folder)

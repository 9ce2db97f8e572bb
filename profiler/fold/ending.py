"""How a run ended and what a person can do then, in words: as the supervisor wrote it, or as far as the
record tells where nobody was left to write."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.record.checkpointevents import CheckpointSaved
from llmtop.profiler.record.endevents import DeviceReturn
from llmtop.profiler.record.leftovers import Left
from llmtop.profiler.record.remote import as_called_here
from llmtop.profiler.units import counted, format_bytes

GONE = "its supervisor is gone and wrote no end"
_WHY_GONE = "it was killed, or the machine was restarted"
_WHO_DID = "dmesg says whether the kernel killed it for memory"
_PIDS_TOLD = 4
_IN_MEMORY = "/dev/shm/"


class Ending(Struct, frozen=True, kw_only=True):
    reason: str = ""
    fix: str = ""
    """Empty for a run that ended well."""


def ending(state: RunState) -> Ending:
    """Empty while the run goes on. A run that came from an archive is not gone on with here."""
    if state.ended is not None:
        return Ending(reason=state.ended.reason, fix=_possible(state.ended.fix, state))
    if state.status == "exported":
        step = f", as far as step {state.steps_finished:,}" if state.steps_finished else ""
        return Ending(reason=f"exported while it ran{step}")
    if state.status != "lost":
        return Ending()
    if state.imported:
        return Ending(reason=f"{GONE}: {_WHY_GONE}", fix=f"{_WHO_DID}, on the machine that it ran on")
    kept = _kept_for_a_relaunch(state)
    if kept is None:
        return Ending(reason=_lost_words(state), fix="; ".join(_after_a_loss(state)))
    where = kept.path
    if where.startswith(_IN_MEMORY):
        where += ", in memory, until the machine is started anew"
    return Ending(
        reason=f"{GONE}, while the run was between two settings",
        fix=f"{_stop_words(state)}its state after step {kept.step:,} is kept in {where};"
        f" {state.command('resume')} goes on from it, on the old setting",
    )


def _possible(fix: str, state: RunState) -> str:
    """Without the parts that go on with an imported run from where it was; of a run on another machine the
    commands are those that are called here."""
    if state.elsewhere:
        return as_called_here(fix, state.run_id, state.elsewhere)
    if not state.imported:
        return fix
    return "; ".join(part for part in fix.split("; ") if "llmtop resume" not in part)


def unsaved_words(state: RunState) -> str:
    """Of the newest checkpoint that was asked for, why it is not there; empty where it is."""
    refused = state.unsaved
    if refused is None:
        return ""
    there = f"the newest is of step {state.checkpoints[-1].step:,}" if state.checkpoints else "there is none"
    lost = _lost_since_words(state) if state.status in ENDED else ""
    return f"the checkpoint of step {refused.step:,} could not be saved, {there}{lost}: {refused.why}"


def _lost_since_words(state: RunState) -> str:
    """How many steps an ended run has made after its newest checkpoint; empty where there is none, and where
    that is of a later step: of such a run nobody has told which it went on after."""
    since = state.steps_finished - state.checkpoints[-1].step if state.checkpoints else 0
    return f", and {_since_are_lost(since)}" if since > 0 else ""


def _since_are_lost(since: int) -> str:
    return f"the {counted(since, 'step')} since {'is' if since == 1 else 'are'} lost"


def not_saved_words(state: RunState, spec: RunSpec) -> str:
    """What an ended run trained and nobody asked to save.

    Empty where its last step is saved, where a checkpoint was refused (`unsaved_words`), and for a command of
    one's own, which keeps its checkpoints itself.
    """
    last = state.steps_finished
    if spec.script is not None or state.status not in ENDED or not last or state.unsaved is not None:
        return ""
    newest = state.checkpoints[-1] if state.checkpoints else None
    if newest is not None and newest.step > last and state.is_of_before(newest.t):
        before = "from before it went on: nothing since is saved"
        return f"the newest checkpoint is of step {newest.step:,}, {before}"
    if newest is not None and newest.step >= last or _kept_for_a_relaunch(state) is not None:
        return ""
    if newest is not None:
        return f"the newest checkpoint is of step {newest.step:,}{_lost_since_words(state)}"
    # A relaunch since then has loaded a later state, which is gone.
    began = state.went_on_from if state.goes_on_after is None else state.goes_on_after
    if state.went_on is not None and began:
        since = last - began
        lost = f"; {_since_are_lost(since)}" if since > 0 else ""
        return f"nothing was saved since it went on after step {began:,}{lost}"
    why = ": checkpoint_every is 0 and save_at_end false" if spec.saves_nothing else ""
    if state.status == "completed":
        return f"nothing was saved{why}"
    lost = f"all {last:,} steps are" if last > 1 else "its one step is"
    return f"nothing was saved{why}; {lost} lost"


def memory_words(state: RunState) -> str:
    """Whether the run's GPUs have their memory back, by the driver; empty where nobody could tell."""
    returned = state.memory_returned
    if returned is None:
        return ""
    devices = [device for device in returned.devices if device.is_back is not None]
    back, kept = [d for d in devices if d.is_back], [d for d in devices if not d.is_back]
    told = [_kept_words(device) for device in kept]
    if back:
        largest = max((d.largest_bytes or 0 for d in back), default=0)
        after = max((d.after_bytes or 0 for d in back), default=0)
        told.append(
            f"memory of GPU {_numbers(back)} is back: {format_bytes(after)} in use, {format_bytes(largest)}"
            " at the most while it ran"
        )
    unread = [device for device in returned.devices if device.is_back is None]
    if unread:
        told.append(f"GPU {_numbers(unread)} does not tell")
    return "; ".join(told)


def _kept_words(device: DeviceReturn) -> str:
    more = (device.after_bytes or 0) - (device.before_bytes or 0)
    who = (
        f" (processes {', '.join(map(str, device.holders))} by the driver's count)" if device.holders else ""
    )
    return f"GPU {device.index} has {format_bytes(more)} more in use than before the run{who}"


def _numbers(devices: Sequence[DeviceReturn]) -> str:
    return ", ".join(str(device.index) for device in devices)


def _kept_for_a_relaunch(state: RunState) -> CheckpointSaved | None:
    """The state that was saved for a relaunch which has made no step: until then nobody removes it."""
    saved = state.last_saved
    return saved if saved is not None and saved.passing and saved.step >= state.steps_finished else None


def _lost_words(state: RunState) -> str:
    """Why nobody wrote the end, and what goes on all the same."""
    left = state.left
    if left is None or not left.pids:
        return f"{GONE}: {_WHY_GONE}"
    one, step = len(left.pids) == 1, state.steps_finished
    told = ", ".join(map(str, left.pids[:_PIDS_TOLD])) + (", ..." if len(left.pids) > _PIDS_TOLD else "")
    where = f", at step {step:,} by the record" if step else ""
    still = f"process {told} of the run still runs" if one else f"processes {told} of the run still run"
    return f"{GONE}: it was killed; {still}{where}"


def _after_a_loss(state: RunState) -> list[str]:
    """What to do, in its order: end what is left, learn why, start again."""
    left = state.left if state.left is not None else Left()
    if left.watched_pid is not None:
        return [f"llmtop attach --pid {left.watched_pid} looks at it again"] if left.pids else [_WHO_DID]
    parts = [f"{state.command('stop')} ends what is left"] if left.pids else []
    parts.append(_WHO_DID)
    if left.command:
        again = "start it again, from its own newest checkpoint where it has one"
        return [*parts, f"{again}: llmtop run -- {left.command}"]
    resume = state.command("resume")
    if state.checkpoints:
        return [*parts, f"{resume} goes on after step {state.checkpoints[-1].step:,}"]
    return [*parts, f"nothing was saved: {resume} --anew begins anew"]


def _stop_words(state: RunState) -> str:
    left = state.left
    return f"{state.command('stop')} ends what is left; " if left is not None and left.pids else ""

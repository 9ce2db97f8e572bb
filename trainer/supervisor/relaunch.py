"""Relaunches in the record: of a run that ended and goes on with another setting, and how one went."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from llmtop.profiler.record.changeevents import RestageBegan, Restaged
from llmtop.profiler.record.events import AnyEvent
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change import restagefolder
from llmtop.trainer.statefile import newest
from llmtop.trainer.supervisor.progress import Progress
from llmtop.trainer.supervisor.underway import Phase, UnderWay, change_asked


def go_on_with(
    run: RunDir, setting: int, ended_on: int, write: Callable[[AnyEvent], object], why: str = ""
) -> UnderWay:
    """Take into the record that the ranks have ended, and that the next ones train on another setting."""
    saved = newest(run.checkpoints_dir)
    tell_change(run, ended_on, setting, write, restage=True, why=why)
    write(
        RestageBegan(
            setting=setting,
            from_setting=ended_on,
            last_step=0 if saved is None else saved.step,
            world_size=run.spec(setting).world_size,
        )
    )
    run.put_in_force(setting)
    return UnderWay(request=None, setting=setting, from_setting=ended_on, phase=Phase.RESUMED)


def tell_change(
    run: RunDir,
    before: int,
    setting: int,
    write: Callable[[AnyEvent], object],
    *,
    restage: bool,
    why: str = "",
) -> None:
    """That the run goes over from one of its settings to another, which nobody has asked a live run for."""
    # The presets are a tenth of a second of imports that few runs need.
    from llmtop.trainer.change.plan import key_changes

    changes = tuple(key_changes(run.spec(before).options, run.spec(setting).options))
    told = change_asked(setting, changes, run.prediction(before), run.prediction(setting), restage=restage)
    write(replace(told, why=why))


def restaged(now: UnderWay, progress: Progress) -> Restaged:
    """The event of a relaunch after which every rank has made a step."""
    back_at = max(first.t for first in progress.first_steps.values())
    stages = dict(progress.stage_seconds)
    down_seconds = None
    if now.last_step_at is not None:
        saving = now.saved.seconds if now.saved is not None else 0.0
        ending = max(0.0, now.relaunched_at - now.last_step_at - saving)
        stages = {"save": saving, "end": ending, **stages}
        down_seconds = back_at - now.last_step_at
        # Processes wait for each other, and for processors on a busy machine.
        stages["in_between"] = max(0.0, down_seconds - sum(stages.values()))
    return Restaged(
        setting=now.setting,
        step=progress.first_steps[0].step,
        down_seconds=down_seconds,
        stage_seconds=stages,
        notes=tuple(progress.loaded_notes),
    )


def keep_in_words(run: RunDir, log: Callable[[str], None]) -> str:
    """Keep what was saved for a relaunch that has made no step, and say where; empty: there is nothing."""
    try:
        kept = restagefolder.keep_states(run)
    except OSError as error:
        log(f"the state saved for the change stays where it is: {error}")
        places = ", ".join(map(str, restagefolder.restage_folders(run)))
        return f"the state saved for the change stays in {places} ({error.strerror or error})"
    for path in kept:
        log(f"the state saved for the change is kept as {path}")
    return f"the state saved for the change is kept as {kept[-1]}" if kept else ""

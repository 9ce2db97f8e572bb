"""Names how a command of the user's own ended."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from llmtop.profiler.record.events import RankFailed, RankFinished, RunEnded, XidSeen
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.scriptevents import RankAttached
from llmtop.trainer.script.unseen import named_after
from llmtop.trainer.supervisor.memoryend import memory_fix
from llmtop.trainer.supervisor.oom import Evidence
from llmtop.trainer.supervisor.postmortem import SMALLER, Story, name_end
from llmtop.trainer.supervisor.ranks import RankExit

_OWN_OPTIONS = "; these are llmtop's words for it: change the script's own settings to match"


class ScriptStory(Struct, frozen=True, kw_only=True):
    """All that is known when nothing of the command is left."""

    run: RunDir
    command: tuple[str, ...]
    exit: RankExit | None
    """Of the command itself; None when it was never seen to end."""
    attached: dict[int, RankAttached] = {}
    failed: dict[int, RankFailed] = {}
    finished: dict[int, RankFinished] = {}
    last_step: int = 0
    stop_asked: bool = False
    killed: bool = False
    """It did not end when it was asked to."""
    left: bool = False
    """It goes on, and is looked at no more."""
    oom_evidence: Evidence | None = None
    xids: tuple[XidSeen, ...] = ()
    lost_devices: tuple[int, ...] = ()
    memory_bytes: dict[int, int] = {}
    """Rank to what its processes held of host memory in the newest sample that saw them."""
    outputs: dict[int, int] = {}
    """Rank to the number under whose log its output is; 0 where it is not told."""


def name_script_end(story: ScriptStory) -> RunEnded:
    """The last event. What a rank told of its own failure explains more than the command's exit code."""
    exit_ = story.exit
    if story.left:
        return RunEnded(state="stopped", reason=f"looked at no more {_when(story)}; its process goes on")
    if story.stop_asked:
        how = " and was killed: it did not end in time" if story.killed else ""
        seen = story.last_step or story.attached
        when = _when(story) if seen else "before any training was seen in it"
        return RunEnded(state="stopped", reason=f"stopped on request {when}{how}")
    script = story.run.spec().script
    if script is not None and script.pid is not None and not story.failed:
        # Only a parent is told how a process ended.
        if story.finished:
            return RunEnded(state="completed", reason=f"process {script.pid} ended by itself {_when(story)}")
        reason = f"process {script.pid} is gone {_when(story)}, how it ended is not known"
        return RunEnded(state="gone", reason=reason, fix="who started it knows: its own log, or dmesg")
    if exit_ is not None and exit_.exit_code == 0:
        return RunEnded(
            state="completed", reason=f"{named_after(story.command)} ended with exit code 0 {_when(story)}"
        )
    # Every rank that told of a failure ended with it; else the command stands for all.
    ranks = tuple(story.failed) or (0 if exit_ is None else exit_.rank,)
    ended = [_as_rank(rank, exit_) for rank in ranks]
    return name_end(
        Story(
            world_size=max(1, len(story.attached)),
            exits=tuple(ended),
            failed=story.failed,
            last_step=story.last_step,
            stepped=story.last_step > 0,
            oom_evidence=story.oom_evidence,
            xids=story.xids,
            lost_devices=story.lost_devices,
            memory_bytes=story.memory_bytes,
            device_fix=lambda failure: _device_fix(story, failure),
            logs={rank: story.run.log_path(story.outputs.get(rank, 0)) for rank in ranks},
        )
    )


def _device_fix(story: ScriptStory, failure: RankFailed | None) -> str:
    script = story.run.spec().script
    if script is None or not script.described:
        return SMALLER.replace("--", "")
    return memory_fix(story.run, failure) + _OWN_OPTIONS


def _as_rank(rank: int, exit_: RankExit | None) -> RankExit:
    return RankExit(rank=rank, pid=0) if exit_ is None else replace(exit_, rank=rank)


def _when(story: ScriptStory) -> str:
    if story.last_step:
        return f"after step {story.last_step:,}"
    return "before its first step" if story.attached else "and no training was seen in it"

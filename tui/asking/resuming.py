"""Going on with a run that has ended, in words, before it is done: from where, with what, at which price."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from msgspec import Struct

from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.remote import name_here
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.afterend import anew_words
from llmtop.trainer.change.goingon import Start, has_all_steps, names_steps, plan_going_on, start_of
from llmtop.trainer.change.plan import ChangePlan
from llmtop.trainer.launch import devices_for
from llmtop.tui.asking.changetext import change_lines, needs_words, side_by_side


class ResumeWish(Struct, frozen=True, kw_only=True):
    """How a run is to go on."""

    words: tuple[str, ...] = ()
    """What is changed, as `key=value`."""
    anyway: bool = False
    """Also where steps are made again, or where it is predicted not to fit."""


class ResumePreview(Struct, frozen=True, kw_only=True):
    """What a person is shown before saying yes."""

    lines: tuple[str, ...]
    warning: str
    """What is lost, or why it is not wise; empty for neither."""


def preview_resume(run: RunDir, state: RunState, words: tuple[str, ...]) -> ResumePreview | None:
    """None where a run has all its steps and `words` name no more; raises UsageError for what cannot be."""
    if has_all_steps(state) and not names_steps(words):
        return None
    start = start_of(run, state, changed=bool(words))
    plan = plan_going_on(run, state, words)
    warning = _warning(start, plan)
    lines = tuple(_lines(run, state, words, start, plan, anyway=bool(warning)))
    return ResumePreview(lines=lines, warning=warning)


def _warning(start: Start, plan: ChangePlan | None) -> str:
    if plan is not None and plan.new_prediction.fits is False:
        return "does not fit: y goes on with it all the same"
    return "nothing was saved: y begins again from step 1" if start.asks else ""


def _lines(
    run: RunDir,
    state: RunState,
    words: tuple[str, ...],
    start: Start,
    plan: ChangePlan | None,
    *,
    anyway: bool,
) -> Iterator[str]:
    steps = (run.spec() if plan is None else plan.new).options.steps
    where = f"goes on after step {start.step:,} of {steps:,}, from its checkpoint"
    yield where if start.step else anew_words(state)
    if state.status == "out_of_memory" and plan is None:
        yield "mind: it ran out of memory with this very setting"
    if not run.spec().on_cpu and (devices := devices_for(run)):
        yield f"on the GPUs {devices} (CUDA_VISIBLE_DEVICES)"
    if plan is None:
        yield f"predicted: {needs_words(run.prediction())}"
    else:
        yield from (f"  {line}" for line in change_lines(plan.changes, whole=False))
        yield "predicted, before and then:"
        yield from (f"  {line}" for line in side_by_side(plan))
        yield from (f"lost: {lost}" for lost in plan.lost)
    yield ""
    yield "the same from a shell:"
    yield f"  {_command(run, words, start, plan, anyway=anyway)}"


def _command(
    run: RunDir, words: tuple[str, ...], start: Start, plan: ChangePlan | None, *, anyway: bool
) -> str:
    no_fit = plan is not None and plan.new_prediction.fits is False
    more = [*(["--anew"] if start.asks and anyway else []), *(["--force"] if no_fit else [])]
    return shlex.join(("llmtop", "resume", name_here(run.path), *words, *more))

"""Going on with a run that has ended, in words, before it is done: from where, with what, at which price."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from llmtop.presets.cautions import cautions
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.remote import command_here
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.units import counted
from llmtop.trainer.change.afterend import anew_words
from llmtop.trainer.change.goingon import Start, has_all_steps, names_steps, plan_going_on, start_of
from llmtop.trainer.change.plan import ChangePlan
from llmtop.trainer.change.setwords import set_words
from llmtop.trainer.launch import devices_for
from llmtop.tui.asking.changetext import Misfit, change_lines, misfit_of, needs_words, side_by_side


class ResumeWish(Struct, frozen=True, kw_only=True):
    """How a run is to go on."""

    words: tuple[str, ...] = ()
    """What is changed, as `key=value`."""
    anew: bool = False
    """Also where it begins again from step 1."""
    force: bool = False
    """Also where it is predicted not to fit."""


class ResumePreview(Struct, frozen=True, kw_only=True):
    """What a person is shown before saying yes."""

    lines: tuple[str, ...]
    wish: ResumeWish
    """What a yes to it is: all that `warning` names, and nothing else."""
    warning: str
    """What is lost, and why it is not wise; empty for neither."""


def preview_resume(run: RunDir, state: RunState, words: tuple[str, ...]) -> ResumePreview | None:
    """None where a run has all its steps and `words` name no more; raises UsageError for what cannot be."""
    if has_all_steps(state) and not names_steps(words):
        return None
    start = start_of(run, state, changed=bool(words))
    plan = plan_going_on(run, state, words)
    misfit = Misfit() if plan is None else misfit_of(plan)
    wish = ResumeWish(words=words, anew=start.asks, force=bool(misfit))
    lines = tuple(_lines(run, state, wish, start, plan, misfit))
    return ResumePreview(lines=lines, wish=wish, warning=_warning(state, wish, misfit))


def _warning(state: RunState, wish: ResumeWish, misfit: Misfit) -> str:
    made = state.steps_finished
    if not wish.anew:
        return f"{misfit.words}: y goes on with it all the same" if misfit else ""
    if misfit:
        return f"{counted(made, 'step')} lost, {misfit.words}: y begins again all the same"
    lost = f"{counted(made, 'step')} {'is' if made == 1 else 'are'} lost" if made else "no step was made"
    return f"{lost}: y begins again from step 1"


def _lines(
    run: RunDir,
    state: RunState,
    wish: ResumeWish,
    start: Start,
    plan: ChangePlan | None,
    misfit: Misfit,
) -> Iterator[str]:
    spec = run.spec() if plan is None else plan.new
    where = f"goes on after step {start.step:,} of {spec.options.steps:,}, from its checkpoint"
    yield where if start.step else anew_words(state)
    if state.status == "out_of_memory" and plan is None:
        yield "mind: it ran out of memory with this very setting"
    if not spec.on_cpu and (devices := devices_for(run)):
        yield f"on the GPUs {devices} (CUDA_VISIBLE_DEVICES)"
    if plan is None:
        yield f"predicted: {needs_words(run.prediction())}"
    else:
        yield from (f"  {line}" for line in change_lines(plan.changes, whole=False))
        yield "predicted, before and then:"
        yield from (f"  {line}" for line in side_by_side(plan))
        yield from misfit.lines()
        yield from (f"lost: {lost}" for lost in plan.lost)
    yield from (f"mind: {set_words(one)}" for one in cautions(spec, launching=True))
    yield ""
    yield "the same from a shell:"
    yield f"  {_command(run, wish)}"


def _command(run: RunDir, wish: ResumeWish) -> str:
    more = [*(["--anew"] if wish.anew else []), *(["--force"] if wish.force else [])]
    return command_here(run.path, "resume", *wish.words, *more)

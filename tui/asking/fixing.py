"""The question after an out-of-memory: what it was, and the changes with which the run would fit."""

from __future__ import annotations

from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.oom.diagnosis import diagnose
from llmtop.profiler.oom.words import fix_words, moment_words, request_words
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.afterend import anew_words, fixes_of, step_to_go_on_from
from llmtop.tui.widgets.dialog import Choice
from llmtop.tui.widgets.paint import harmless


def fix_choices(run: RunDir, state: RunState) -> tuple[Choice, ...]:
    """One for each change that the run can go on with, under its number in the report."""
    return tuple(
        Choice(str(fix.number), harmless(fix_words(fix)), str(fix.number)) for fix in fixes_of(run, state)
    )


def fix_text(run: RunDir, state: RunState) -> tuple[str, ...]:
    """What happened, and from where the run would go on."""
    setting = state.changes.setting
    found = diagnose(state, run.spec(setting), run.prediction(setting))
    step = step_to_go_on_from(run, state)
    then = f"It {anew_words(state)}." if step is None else f"It goes on after step {step:,}."
    told = () if found is None else (moment_words(found), request_words(found))
    return (*(harmless(line) for line in told if line), then)

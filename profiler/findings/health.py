"""Findings about whether the run lives, learns and is kept: failures, hangs, refused checkpoints, losses that
are not numbers."""

from __future__ import annotations

from collections.abc import Iterator
from math import log2

from llmtop.presets.spec import RunOptions
from llmtop.profiler.findings.finding import Finding, Rule, Seen, first_line, words
from llmtop.profiler.fold.ending import ending, unsaved_words
from llmtop.profiler.fold.runstate import ENDED
from llmtop.profiler.units import counted, format_percent, format_seconds

SKIPPED_FLOOR, SKIPPED_SHARE = 5, 0.05
"""fp16 looks for its loss scale by a few skipped steps at the start; more than these mean trouble."""
SEARCH_STEPS = 50
"""The search for a loss scale is over by then: 2^16 comes down to 1 in sixteen skipped steps."""
COLLAPSE_STEPS, COLLAPSE_HALVINGS = 100, 4
"""A healthy scale is halved about once in the thousand steps after which it is doubled again."""


def failed(seen: Seen) -> Iterator[Finding]:
    state = seen.state
    if state.status != "failed":
        return
    told = [
        f"rank {number}: {rank.failed.error_type}: {first_line(rank.failed.message)}"
        for number, rank in sorted(state.ranks.items())
        if rank.failed is not None
    ]
    reason = state.ended.reason if state.ended else ""
    yield Finding(
        key="failed",
        severity="critical",
        title="the run failed",
        evidence="; ".join([part for part in (reason, *told[:1]) if part]),
        change=ending(state).fix or f"see llmtop logs {state.called}",
    )


def lost(seen: Seen) -> Iterator[Finding]:
    if seen.state.status == "lost":
        end = ending(seen.state)
        yield Finding(
            key="lost",
            severity="critical",
            title="the run's supervisor is gone",
            evidence=f"{end.reason}; the last step in its record is {seen.state.steps_finished}",
            change=end.fix,
        )


def hanging(seen: Seen) -> Iterator[Finding]:
    """Which rank is behind, in which stage each that is in one is, and for how long."""
    state = seen.state
    if state.hang_seconds is None:
        return
    last = {number: rank.last_step.step if rank.last_step else 0 for number, rank in state.ranks.items()}
    behind = [number for number, step in last.items() if step == min(last.values())]
    where = f"; all {len(last)} ranks are at the same step" if len(last) > 1 else ""
    if behind and len(behind) < len(last):
        where = f"; rank {', '.join(map(str, behind[:4]))} is behind at step {min(last.values())}"
    stuck = [
        f"rank {number} in {words(rank.stages[-1].stage)}"
        for number, rank in sorted(state.ranks.items())
        if rank.stages and rank.stages[-1].seconds is None
    ]
    goes_on = state.status not in ENDED
    # Where it went on and nobody has told after which step.
    since = "it was gone on with" if state.present_step is None else f"step {state.present_step}"
    yield Finding(
        key="hang",
        severity="critical",
        title="no step for a long time",
        evidence=f"{format_seconds(state.hang_seconds)} since {since}"
        + where
        + (f"; {', '.join(stuck[:4])}" if stuck else ""),
        change=f"see where each rank stands: {state.command('stacks')} (t in the monitor); what they say: "
        f"llmtop logs {state.called}; end it with llmtop stop {state.called}"
        if goes_on
        else "the ranks waited for each other; the rank that is behind is the one to look at",
        command=state.command("stacks") if goes_on else "",
    )


def loss_not_finite(seen: Seen) -> Iterator[Finding]:
    state, options = seen.state, seen.spec.options
    if not state.nonfinite_losses:
        return
    is_now = state.present_loss is None and not state.made_no_step
    now = f"{'still' if is_now else 'not any more'} in step {state.present_step}"
    yield Finding(
        key="loss_not_finite",
        severity="critical" if is_now else "warning",
        title="the loss is not a number" if is_now else "the loss was not a number",
        evidence=f"{state.nonfinite_losses} steps, first in step {state.first_nonfinite_step}, "
        + ("and none was made since it went on" if state.made_no_step else now),
        change=_steadier(options),
    )


def unwritable(seen: Seen) -> Iterator[Finding]:
    state = seen.state
    if state.unwritable:
        yield Finding(
            key="unwritable",
            severity="critical",
            title="nothing is recorded",
            evidence=f"{state.unwritable}: the training goes on, what is shown stands still, and checkpoints"
            " are refused",
            change="make room: what happens meanwhile waits in memory and is recorded then",
        )
        return
    told = [one for one in state.writing_resumed if one.lost]
    if told:
        yield Finding(
            key="events_lost",
            severity="warning",
            title="part of the run was not recorded",
            evidence="; ".join(
                f"{one.src}: {counted(one.lost, 'event')} of {format_seconds(one.seconds)} in which its log"
                " could not be written"
                for one in told[:4]
            ),
            change="",
        )


def checkpoints_refused(seen: Seen) -> Iterator[Finding]:
    state = seen.state
    refused, told = state.checkpoints_refused, unsaved_words(state)
    if not refused:
        return
    count, last = f"{counted(len(refused), 'checkpoint')} refused", refused[-1]
    if not told:
        yield Finding(
            key="checkpoints_refused",
            severity="warning",
            title="checkpoints could not be saved",
            evidence=f"{count}, the last at step {last.step:,}: {last.why}; one was saved since",
            change="",
        )
        return
    elsewhere = "free some space, or let runs be kept on another disk (LLMTOP_RUNS_DIR)"
    yield Finding(
        key="checkpoints_refused",
        severity="critical",
        title="the training is not saved",
        evidence=f"{count}; {told}",
        change="mend what is said there before the run ends: the next checkpoint tries again, and so does"
        f" llmtop stop {state.called} --save"
        if state.status not in ENDED
        else f"what was learned since is lost; before the next run mend what is said there: {elsewhere}",
    )


def _steadier(options: RunOptions) -> str:
    """What keeps losses and gradients finite, as far as the run does not do it yet."""
    changes = [f"lower --learning-rate from {options.learning_rate:g}"]
    if not options.warmup_steps:
        changes.append("warm up (--set warmup_steps=100)")
    if not options.max_grad_norm:
        changes.append("clip gradients (--set max_grad_norm=1)")
    if options.precision == "fp16":
        changes.append("use --precision bf16")
    return ", ".join(changes)


def steps_skipped(seen: Seen) -> Iterator[Finding]:
    """Skipped steps; only fp16 has a loss scale that a few of them belong to."""
    state, options = seen.state, seen.spec.options
    is_fp16 = options.precision == "fp16"
    rank = state.first
    scale = rank.last_step.loss_scale if is_fp16 and rank and rank.last_step else None
    falling = _halvings(seen) if is_fp16 else 0
    collapsed = scale is not None and scale <= 1.0 and (state.first_loss_scale or 0.0) > 1.0
    many = state.skipped_steps >= SKIPPED_FLOOR and state.skipped_steps > SKIPPED_SHARE * state.steps_made
    if not collapsed and not many and falling < COLLAPSE_HALVINGS:
        return
    share = format_percent(100 * state.skipped_steps / max(1, state.steps_made))
    scales = f"; the loss scale went from {state.first_loss_scale:g} to {scale:g}" if scale else ""
    if falling >= COLLAPSE_HALVINGS:
        scales += f", halved {falling} times in the last {COLLAPSE_STEPS} steps"
    yield Finding(
        key="loss_scale" if is_fp16 else "steps_skipped",
        severity="critical" if collapsed else "warning",
        title=f"{'fp16 overflows' if is_fp16 else 'gradients are not finite'}; steps are skipped",
        evidence=f"{state.skipped_steps} of {state.steps_made} steps skipped ({share}){scales}",
        change="use --precision bf16, or lower --learning-rate" if is_fp16 else _steadier(options),
    )


def _halvings(seen: Seen) -> int:
    """How often the loss scale was halved lately, after the search for it at the start."""
    series = seen.state.series
    newest = series.steps[-1] if series.steps else 0
    since = max(SEARCH_STEPS, newest - COLLAPSE_STEPS)
    scales = [
        scale for step, scale in zip(series.steps, series.loss_scales, strict=True) if scale and step >= since
    ]
    if len(scales) < 2:
        return 0
    return max(0, round(log2(max(scales) / scales[-1])))


HEALTH_RULES: tuple[Rule, ...] = (
    failed,
    lost,
    hanging,
    unwritable,
    checkpoints_refused,
    loss_not_finite,
    steps_skipped,
)

"""What the top of the monitor says: which run, in what state, how far; once it has ended, how and why."""

from __future__ import annotations

from statistics import median

from llmtop.profiler.changewords import down_words, under_way_words
from llmtop.profiler.fold.ending import ending, memory_words
from llmtop.profiler.fold.modelname import model_name
from llmtop.profiler.fold.runstate import ENDED
from llmtop.profiler.gpuwords import gpu_words
from llmtop.profiler.record.naming import cut_words
from llmtop.profiler.units import format_bytes, format_percent, format_progress, format_seconds
from llmtop.tui.feeds.owncost import OwnCost
from llmtop.tui.feeds.view import STATUS_MARKS, RunView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import gauge, harmless, two_sided, wrapped_rows

READ_ONLY = ("  read-only", "bold $text-warning")
"""In the head of a screen that only looks on."""

_RECENT_STEPS = 20
_LEAST_BAR_CELLS = 12
"""What is left for the bar of steps beside what the app itself costs."""


def head_rows(
    view: RunView, width: int, now: float, cost: OwnCost | None, *, read_only: bool, leads_to: str
) -> list[Content]:
    """Of at most `width` cells: two while a run goes on, more of how one has ended; `leads_to` says what the
    command shows once the app is left."""
    rows = [identity(view, width, READ_ONLY if read_only else None), *_second_rows(view, width, now, cost)]
    if leads_to and view.state.status in ENDED:
        rows[1] = two_sided(rows[1], Content.styled(f"q: {leads_to}", "bold $text-accent"), width)
    return [line for row in rows for line in wrapped_rows(row, width)]


def clock_text(seconds: float | None) -> str:
    """`0:07`, `12:34`, `1:02:03`, from a day on `3d 04h`: whole seconds, for what is seen ticking."""
    if seconds is None or seconds >= 86400:
        return format_seconds(seconds)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def identity(view: RunView, width: int, badge: tuple[str, str] | None = None) -> Content:
    """Which run it is; where there is little room, what other panels tell too is left out first."""
    state, spec = view.state, view.spec
    mark, word, colour = STATUS_MARKS[state.status]
    right = Content.assemble((f"{mark} {word}", f"bold ${colour}"))
    model, run_id = harmless(model_name(spec, state)), harmless(state.run_id)
    devices = f"{spec.world_size} x {harmless(gpu_words(spec))}"
    # Of a script nobody knows whether there is an engine before it is seen.
    zero = (f"ZeRO-{spec.options.zero}",) if spec.knows("zero") else ()
    if state.host_ranks is not None:
        devices = f"{_ranks_words(state.ranks_here)} of {spec.world_size}"
    # The short id is enough for every command, and the name in the middle of the id stands on the left.
    end = harmless(cut_words(view.short_id or state.run_id, state.run_id))
    ways = (
        ((model, devices, *zero), run_id),
        ((model, devices, *zero), end),
        ((model, devices), end),
        ((model,), end),
        ((), end),
    )
    for told, shown_id in ways:
        left = Content.assemble(
            (harmless(spec.name), "bold $text-primary"),
            ("  ".join(("", *told, "")), "$foreground"),
            (shown_id, "$muted"),
            *([badge] if badge is not None else ()),
        )
        if left.cell_length + right.cell_length + 1 <= width:
            break
    return two_sided(left, right, width)


def _ranks_words(ranks: range) -> str:
    """Where only a part of the run is shown."""
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start} to {ranks.stop - 1}"


def _second_rows(view: RunView, width: int, now: float, cost: OwnCost | None) -> list[Content]:
    if view.state.status in ENDED:
        return _ending(view, width)
    return [_progress(view, width, now, cost)]


def _progress(view: RunView, width: int, now: float, cost: OwnCost | None) -> Content:
    state, planned, remote = view.state, view.spec.steps_planned, view.remote
    away = remote.away_words(now) if remote is not None else ""
    # Its steps carry the times of the machine that it is on.
    now += remote.ahead_seconds if remote is not None else 0.0
    elapsed = state.seconds_until(now)
    done = state.present_step
    words = [("elapsed ", "$muted"), (clock_text(elapsed), "")]
    pace = state.speed_series.step_seconds[-_RECENT_STEPS:]
    if planned is not None:
        left = clock_text(median(pace) * (planned - done)) if pace and done is not None else "n/a"
        words += [("  left ", "$muted"), (left, "")]
    notes: list[tuple[str, str]] = []
    if away:
        notes = [(f"  ! {harmless(away)}", "bold $text-warning")]
    elif state.hang_seconds is not None:
        notes = [(f"  ! no step for {format_seconds(state.hang_seconds)}", "bold $text-warning")]
    elif down := under_way_words(state, now):
        notes = [(f"  {down}", "$text-accent")]
    elif state.compiling:
        notes = [(f"  compiling {harmless(state.compiling)}", "$text-accent")]
    tail = Content.assemble(*words, *notes)
    if done is None:
        told = Content.styled("goes on, starting", "$text-accent")
        return Content.assemble(told, "  ", tail).truncate(width, ellipsis=True)
    share = None if planned is None else done / planned
    percent = "" if share is None else f" {share:4.0%} "
    head = Content.assemble(("step ", "$muted"), (format_progress(done, planned), "bold"), percent)
    room = width - head.cell_length - tail.cell_length - 2
    own = f"  {cost.words}" if cost is not None else ""
    if own and room - len(own) >= _LEAST_BAR_CELLS:
        tail, room = Content.assemble(tail, (own, "$muted")), room - len(own)
    bar = Content("") if share is None or room < 8 else gauge(share, room, style="$primary")
    return Content.assemble(head, bar, "  ", tail).truncate(width, ellipsis=True)


def _ending(view: RunView, width: int) -> list[Content]:
    """How and why it ended, what to do about it, and predicted against actual."""
    state, found = view.state, view.breakdown
    _, word, colour = STATUS_MARKS[state.status]
    end = ending(state)
    ended = state.ended.t if state.ended is not None else state.now
    took = state.seconds_until(ended)
    good = state.status in ("completed", "stopped")
    rows = [
        Content.assemble(
            (f"{word.upper()}: ", f"bold ${colour}"),
            (harmless(end.reason), "" if good else "bold"),
        ),
    ]
    if end.fix:
        rows.append(Content.assemble(("fix: ", "bold $text-warning"), harmless(end.fix)))
    if told := memory_words(state):
        rows.append(Content.styled(told, "$muted").truncate(width, ellipsis=True))
    error = (
        ""
        if found.error_percent is None
        else f" ({format_percent(found.error_percent, signed=True, digits=0)})"
    )
    last = Content.assemble(
        ("steps ", "$muted"),
        format_progress(state.steps_finished, view.spec.steps_planned),
        ("  in ", "$muted"),
        format_seconds(took),
        ("  peak predicted ", "$muted"),
        f"{format_bytes(found.predicted_peak_bytes)}{error}",
        ("  actual ", "$muted"),
        format_bytes(found.actual_peak_bytes),
    )
    down = f"  {down_words(state)}"
    if down.strip() and last.cell_length + len(down) <= width:
        last = Content.assemble(last, (down, "$muted"))
    return [*rows, last]

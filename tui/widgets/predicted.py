"""The prediction of a plan: verdict, peak by component, host, speed, and the changes that would help."""

from __future__ import annotations

import textwrap

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.reactive import reactive

from llmtop.presets.spec import RunSpec
from llmtop.profiler.breakdown import breakdown
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.result import MOMENT_WORDS, Component, Prediction, Suggestion, is_short
from llmtop.profiler.units import (
    format_bytes,
    format_count,
    format_range,
    format_seconds,
    format_tokens_rate,
)
from llmtop.tui.plans.place import Place
from llmtop.tui.plans.planning import Plan
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.inputrows import input_rows
from llmtop.tui.widgets.paint import Segment, fit, fit_right, harmless, stacked, wrapped
from llmtop.tui.widgets.painted import Painted
from llmtop.tui.widgets.palette import component
from llmtop.tui.widgets.placebars import gpu_bars, host_bar

MOST_FIXES = 5
_FEWEST_COMPONENTS = 3
_PEAK_ROWS = 4
"""Rows that are there for every prediction above its components."""
_LABEL_CELLS = 8


def verdict(plan: Plan, host_limit_bytes: int | None = None) -> tuple[str, str]:
    """Of a plan in two or three words, and their style; the limit is of the machine that it would be on."""
    if plan.waits:
        return "… tracing", "bold $text-warning"
    if plan.prediction is None:
        return "✗ not valid", "bold $text-error"
    if plan.refusals:
        return "✗ cannot run", "bold $text-error"
    if plan.prediction.fits is not False and is_short(plan.prediction.host_bytes, host_limit_bytes):
        return "✗ host memory is short", "bold $text-error"
    return _fits_words(plan.prediction)


def _fits_words(prediction: Prediction) -> tuple[str, str]:
    if prediction.fits is None:
        return "? not known whether it fits", "bold $text-warning"
    if prediction.tight:
        return "✓ fits, but tight", "bold $text-warning"
    return ("✓ fits", "bold $text-success") if prediction.fits else ("✗ does not fit", "bold $text-error")


class PredictedPane(VerticalScroll):
    """Repaints when the plan changes; what does not fit its height scrolls, after Tab, by arrow keys."""

    plan: reactive[Plan | None] = reactive(None, repaint=False)
    place: reactive[Place] = reactive(Place(), repaint=False)

    def __init__(self) -> None:
        super().__init__(id="predicted")
        self._body = Painted("looking at this machine")

    def compose(self) -> ComposeResult:
        yield self._body

    def watch_plan(self) -> None:
        self.repaint()

    def watch_place(self) -> None:
        self.repaint()

    def on_resize(self) -> None:
        self.repaint()

    def repaint(self) -> None:
        size = self.scrollable_content_region.size
        if self.plan is not None and size.width > 0:
            rows = _rows(self.plan, self.place, size.width, size.height)
            self._body.paint(Content("\n").join(rows), size.width)


def _rows(plan: Plan, place: Place, width: int, height: int) -> list[Content]:
    if plan.spec is None or plan.prediction is None:
        rows = _problem(plan.what, plan.why, plan.fix, waits=plan.waits)
        for wrong in plan.also_wrong:
            rows += [Content(""), *_problem(wrong.what, wrong.why, wrong.fix)]
        return rows
    rows = []
    for refusal in plan.refusals:
        rows += [*_problem(refusal.what, refusal.why, refusal.fix), Content("")]
    fixes = [*_notes(plan.cautions, width), *_fixes(plan, width, place.host_limit_bytes)]
    beside = [*gpu_bars(plan.prediction, place.gpus, width), *_elsewhere(plan.prediction, place, width)]
    reads = input_rows(plan.spec, _LABEL_CELLS, "tokens", width=width)
    parts = _parts(plan.spec, plan.prediction)
    room = height - _rows_high(rows, width) - _PEAK_ROWS - len(beside) - len(fixes)
    if room < len(parts) + len(reads):
        reads = input_rows(plan.spec, _LABEL_CELLS, "tokens", brief=True, width=width)
    room -= len(reads)
    limit = place.host_limit_bytes
    rows += _peak(plan, parts, width, max(room, _FEWEST_COMPONENTS), limit)
    return [*rows, *beside, *reads, *fixes]


def _rows_high(rows: list[Content], width: int) -> int:
    return Content("\n").join(rows).get_height(width)


def _problem(what: str, why: str, fix: str, *, waits: bool = False) -> list[Content]:
    mark = ("… ", "bold $text-warning") if waits else ("✗ ", "bold $text-error")
    rows = [Content.assemble(mark, (harmless(what), "bold"))]
    if why:
        rows.append(Content.assemble(("why ", "$muted"), harmless(why)))
    if fix:
        rows.append(Content.assemble(("" if waits else "fix ", "bold $text-warning"), harmless(fix)))
    return rows


def _parts(spec: RunSpec, prediction: Prediction) -> dict[Component, int]:
    """The same split as in the comparison after the run: what lies outside the allocator counts too."""
    compared = breakdown(RunState(), spec, prediction).rows
    return {row.component: row.predicted_bytes for row in compared if row.predicted_bytes}


def _peak(
    plan: Plan, parts: dict[Component, int], width: int, room: int, host_limit_bytes: int | None
) -> list[Content]:
    spec, prediction = plan.spec, plan.prediction
    if spec is None or prediction is None:
        return []
    total = sum(parts.values())
    memory = prediction.device_memory_bytes
    share = memory / spec.options.gpus if memory is not None and spec.on_cpu else memory
    scale = max(total, share or 0) or 1
    segments = [Segment(component(c).letter, component(c).colour, size) for c, size in parts.items()]
    # What cannot run is not told to fit: its figures alone are.
    fits = [] if plan.refusals else [verdict(plan, host_limit_bytes), ("  ", "")]
    rows = [
        Content.assemble(*fits, ("peak ", "$muted"), (format_bytes(prediction.peak_allocated_bytes), "bold")),
        stacked(segments, scale, width, limit=share),
        Content.assemble(
            ("needs up to ", "$muted"),
            format_bytes(prediction.needed_bytes),
            (" of ", "$muted"),
            format_bytes(memory),
        ),
        Content.assemble(("peak at ", "$muted"), MOMENT_WORDS[prediction.peak_moment]),
    ]
    held = _held_rows(spec, prediction)
    rows, room = [*rows, *held], max(room - len(held), _FEWEST_COMPONENTS)
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    rows += [_component_row(name, size, total, width) for name, size in ordered[:room]]
    if len(ordered) > room:
        rest = sum(size for _, size in ordered[room - 1 :])
        rows[-1] = Content.styled(f"  {len(ordered) - room + 1} more, {format_bytes(rest)}", "$muted")
    return rows


def _held_rows(spec: RunSpec, prediction: Prediction) -> list[Content]:
    """On the CPU kind: what the parts add up to, with what a process's heap keeps, and with the margin what
    the verdict counts of each."""
    if not spec.on_cpu:
        return []
    low, high = map(format_bytes, prediction.peak_reserved_bytes)
    return [Content.assemble(("each holds ", "$muted"), format_range(low, high))]


def _component_row(name: str, size: int, total: int, width: int) -> Content:
    swatch = component(name)
    label = max(8, min(20, width - 2 - 10 - 5))
    return Content.assemble(
        (f"{swatch.letter} ", f"bold {swatch.colour}"),
        fit(swatch.label, label),
        fit_right(format_bytes(size), 10),
        (fit_right(f"{size / total:.0%}" if total else "", 5), "$muted"),
    )


def _elsewhere(prediction: Prediction, place: Place, width: int) -> list[Content]:
    """Host memory, NVMe, parameters and speed."""
    bar = host_bar(prediction, place.machine, width)
    also = [f"{format_bytes(prediction.pinned_bytes)} pinned"] if prediction.pinned_bytes else []
    also += [f"NVMe {format_bytes(prediction.nvme_bytes)}"] if prediction.nvme_bytes else []
    host = ", ".join(also if bar is not None else [format_bytes(prediction.host_bytes), *also])
    speed = format_seconds(prediction.step_seconds)
    if prediction.tokens_per_second is not None:
        speed += f", {format_tokens_rate(prediction.tokens_per_second)}"
    trained = format_count(prediction.trainable_params)
    params = format_count(prediction.params)
    if prediction.trainable_params != prediction.params:
        params += f", {trained} trained"
    told = [("host" if bar is None else "", host)] if host else []
    told += [("step", speed), ("params", params)]
    rows = [Content.assemble((fit(label, _LABEL_CELLS), "$muted"), text) for label, text in told]
    return rows if bar is None else [bar, *rows]


def offered(plan: Plan) -> tuple[Suggestion, ...]:
    """The changes that can be applied; none of them makes a run work that cannot."""
    if plan.prediction is None or plan.refusals:
        return ()
    return plan.prediction.suggestions[:MOST_FIXES]


def _fixes(plan: Plan, width: int, host_limit_bytes: int | None) -> list[Content]:
    shown = offered(plan)
    if not shown or plan.prediction is None:
        return []
    title = "to use the room" if plan.prediction.fits else "to make it fit"
    rows = [Content.styled(f"{title}, press its number", "bold $text-primary")]
    for number, suggestion in enumerate(shown, start=1):
        rows += _fix(number, suggestion, width, host_limit_bytes)
    return rows


def _notes(cautions: tuple[str, ...], width: int) -> list[Content]:
    """What is not wrong and still likely not meant."""
    rows: list[Content] = []
    for caution in cautions:
        first, *more = wrapped(harmless(caution), max(width - 5, 16))
        rows.append(Content.assemble(("note ", "bold $text-warning"), first))
        rows += [Content(f"     {line}") for line in more]
    return rows


def _fix(number: int, suggestion: Suggestion, width: int, host_limit_bytes: int | None) -> list[Content]:
    """Verdict and what is then needed first, then in words what it is and what it costs."""
    short = is_short(suggestion.host_bytes, host_limit_bytes)
    mark, style = {True: ("✓", "$text-success"), False: ("✗", "$text-error"), None: ("?", "$text-warning")}[
        False if short else suggestion.fits
    ]
    need = fit_right(format_bytes(suggestion.needed_bytes), 8)
    head = Content.assemble((f"{number} ", "bold $accent"), (f"{mark} ", style), f"{need}  ")
    indent = " " * head.cell_length
    rate = suggestion.tokens_per_second
    speed = "" if rate is None else f"; {format_tokens_rate(rate)}"
    rows = textwrap.wrap(
        suggestion.words
        + (f" of {format_bytes(host_limit_bytes)} here" if short else "")
        + ("; fits, but tight" if suggestion.tight and not short else "")
        + speed,
        max(width, 24),
        initial_indent=indent,
        subsequent_indent="    ",
    )
    first, *more = rows or [""]
    return [
        Content.assemble(head, first.removeprefix(indent)),
        *(Content.styled(line, "$muted") for line in more),
    ]

"""Two runs side by side as one page."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from llmtop.presets.spec import Provenance, changed_by
from llmtop.profiler.effects.compare import Comparison, Side, compare
from llmtop.profiler.effects.comparewords import (
    change_words,
    is_measured,
    no_options_words,
    option_words,
    options_note,
    setting_words,
    side_words,
    spread_words,
)
from llmtop.profiler.export.secrets import Scrubber
from llmtop.profiler.memory.result import Component
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.report import markup
from llmtop.profiler.report.envelope import Envelope
from llmtop.profiler.report.figures import component_colour
from llmtop.profiler.report.history import History, read_history
from llmtop.profiler.report.markup import Markup, element, figure, joined, section, table
from llmtop.profiler.report.pagedata import scrubbed
from llmtop.profiler.report.svg import Bar, Label, Line, Plot, bars_svg, legend, plot_svg
from llmtop.profiler.units import figures as three_figures
from llmtop.profiler.units import format_bytes, format_seconds

_LETTERS = ("A", "B")
_PLOTS: Mapping[str, tuple[str, Label]] = {
    "loss": ("Loss", three_figures),
    "step_seconds": ("Step time", format_seconds),
    "learning_rate": ("Learning rate", three_figures),
}


class ComparePage(Struct, frozen=True, kw_only=True):
    found: Comparison
    histories: tuple[History, History]


def read_compare_page(first: RunDir, second: RunDir, scrubber: Scrubber) -> str:
    """Read both runs; the page, without secrets."""
    found = scrubbed(scrubber, compare(first, second))
    return compare_page(ComparePage(found=found, histories=(read_history(first), read_history(second))))


def compare_page(data: ComparePage) -> str:
    found = data.found
    return markup.page(
        f"{found.first.run_id} and {found.second.run_id}: llmtop",
        element("h1", "Two runs side by side"),
        _sides(found),
        _unfair(found),
        section("Options", _options(found), *_settings(found), anchor="options"),
        section("Time and memory", _changes(found), _peaks(found), anchor="changes"),
        section("Training", *_plots(data), anchor="training"),
        section("What ran", _ran(found), anchor="ran"),
        section("Versions", _versions(found), anchor="versions"),
    )


def _both(found: Comparison) -> tuple[tuple[str, Side], tuple[str, Side]]:
    return (_LETTERS[0], found.first), (_LETTERS[1], found.second)


def _sides(found: Comparison) -> Markup:
    rows = [
        (letter, side.run_id, side.status.replace("_", " "), side_words(side))
        for letter, side in _both(found)
    ]
    return table(("", "run", "status", ""), rows)


def _unfair(found: Comparison) -> Markup:
    if not found.unfair:
        return Markup("")
    reasons = (element("div", reason, kind="finding warning") for reason in found.unfair)
    return joined(
        (
            element("p", "Not a fair comparison, because", kind="warn"),
            *reasons,
        )
    )


def _options(found: Comparison) -> Markup:
    told = options_note(found)
    note = element("p", f"{told}.", kind="dim") if told else Markup("")
    if not found.options:
        words = f"Options: {no_options_words(found)}." if told else "All options are alike."
        return joined((element("p", words), note))
    rows = [
        (
            option.option,
            option_words(option.first, option.first_from),
            _source(option.first_from),
            option_words(option.second, option.second_from),
            _source(option.second_from),
        )
        for option in found.options
    ]
    return joined((table(("option", "A", "from", "B", "from"), rows), note))


def _source(found: Provenance | None) -> str:
    if found is None:
        return ""
    return changed_by(found) or f"{found.source} {found.detail}".strip()


def _settings(found: Comparison) -> list[Markup]:
    """Of a run that was changed while it ran: all that it trained on."""
    return [
        joined(
            (
                element("h3", f"Settings of {letter}, in their order"),
                table(
                    ("steps", "options", "step time", "peak"), map(setting_words, side.settings), right=(2, 3)
                ),
            )
        )
        for letter, side in _both(found)
        if len(side.settings) > 1
    ]


def _changes(found: Comparison) -> Markup:
    rows = [change_words(change, found.loss_step) for change in found.changes if is_measured(change)]
    words = spread_words(found)
    note = element("p", words, kind="dim") if words else Markup("")
    return joined((table(("", "A", "B", "B - A", ""), rows, right=(1, 2, 3, 4)), note))


def _peaks(found: Comparison) -> Markup:
    """What the peak of each is made of."""
    sizes = {change.name: (change.first, change.second) for change in found.changes if change.unit == "bytes"}
    names = [str(part) for part in Component if any(sizes.get(str(part), (None, None)))]
    totals = sizes.get("peak_bytes", (None, None))
    bars = [
        Bar(
            name=f"peak of {letter}",
            parts=tuple(
                (name.replace("_", " "), size, component_colour(name))
                for name in names
                if (size := sizes[name][at]) is not None and size > 0
            ),
            total=format_bytes(totals[at]),
        )
        for at, letter in enumerate(_LETTERS)
    ]
    keys = legend([(name.replace("_", " "), component_colour(name)) for name in names])
    return figure("Peak memory by component", bars_svg("Peak memory", bars, format_bytes), Markup(keys))


def _plots(data: ComparePage) -> list[Markup]:
    found = []
    for name, (title, label) in _PLOTS.items():
        lines = tuple(
            Line(name=letter, envelope=history.steps.get(name, Envelope()), colour=at, dashed=bool(at))
            for at, (letter, history) in enumerate(zip(_LETTERS, data.histories, strict=True))
        )
        plot = Plot(
            title=title,
            lines=lines,
            x_label=lambda value: f"{value:,.0f}",
            y_label=label,
            x_title="step",
            from_zero=name != "loss",
        )
        keys = legend([(line.name, line.colour) for line in lines if line.envelope.x])
        found.append(figure(title, plot_svg(plot), Markup(keys)))
    return found


def _ran(found: Comparison) -> Markup:
    rows = [
        (row.what, row.first or "not seen", row.second or "not seen")
        for row in found.ran
        if row.first is not None or row.second is not None
    ]
    return table(("", "A", "B"), rows)


def _versions(found: Comparison) -> Markup:
    one, two = found.first.versions, found.second.versions
    rows = [(name, one.get(name, ""), two.get(name, "")) for name in dict.fromkeys((*one, *two))]
    return table(("package", "A", "B"), rows)

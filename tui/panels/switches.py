"""The switches of the run: asked for, really on, and what each changed on this machine."""

from __future__ import annotations

from textual.reactive import reactive

from llmtop.profiler.effects.switches import Measured, Switch, measure, switches
from llmtop.profiler.record.naming import short_ids
from llmtop.profiler.units import format_bytes, format_percent
from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.content import Content, cell_len
from llmtop.tui.widgets.paint import fit, fit_right, harmless, lines, wrapped
from llmtop.tui.widgets.panel import Panel

_MARKS = {True: ("✓", "$text-success"), False: ("✗", "$text-error"), None: ("?", "$muted")}
_OFF = ("·", "$muted")
_LEGEND = ("✓ on   ✗ not as asked for   ? nothing tells", "· off, or as it is without asking")
_LABEL_CELLS, _TIME_CELLS, _PEAK_CELLS = 14, 9, 12
_LEAST_ASKED_CELLS, _MOST_ASKED_CELLS = 10, 32
_MARK_CELLS = 2
_CHANGE_THE_STEP = ("micro_batch", "grad_accum")
"""Switches that give a step more tokens: its time alone says little."""


class SwitchesPanel(Panel):
    TITLE = "Switches"
    KEY = "w"

    others: reactive[tuple[Measured, ...] | None] = reactive(None, repaint=False)
    """Runs that differ in one switch; None until they have been read."""

    def headline(self, view: RunView) -> tuple[str, ...]:
        return ("measured against runs that differ in one switch alone", "against runs unlike in one switch")

    def watch_others(self) -> None:
        self.repaint()

    def draw(self, view: RunView, width: int, height: int) -> Content:
        own = measure(view.state.run_id, view.spec, view.state, view.prediction)
        found = switches(own, view.state.first, self.others or ())
        rest = width - _MARK_CELLS - _LABEL_CELLS - _TIME_CELLS - _PEAK_CELLS
        asked = max(_LEAST_ASKED_CELLS, min(_MOST_ASKED_CELLS, rest // 2))
        head = fit("", _MARK_CELLS) + fit("switch", _LABEL_CELLS) + fit("asked for", asked)
        head += fit_right("step time", _TIME_CELLS) + fit_right("peak", _PEAK_CELLS) + "  against"
        rows = [Content.styled(fit(head, width), "$muted")]
        for switch in sorted(found, key=_quiet):
            rows += _rows(switch, asked, width)
        rows += [Content(""), *(Content.styled(row, "$muted") for row in _LEGEND)]
        if self.others is None:
            rows.append(Content.styled("reading the other runs", "$muted"))
        return lines(rows)


def _quiet(switch: Switch) -> bool:
    """A switch that is off, as asked, and that nothing was measured of."""
    return switch.is_off and switch.compared_run is None and switch.on is not False


def _rows(switch: Switch, asked: int, width: int) -> list[Content]:
    mark, style = _OFF if switch.is_off and switch.on is not False else _MARKS[switch.on]
    setting = harmless(switch.asked)
    name = Content.assemble((f"{mark} ", style), fit(switch.label, _LABEL_CELLS))
    change = Content.assemble(name, fit(setting, asked), _change(switch))
    against = _against(switch)
    in_row = change.cell_length + against.cell_length <= width
    told = [setting] if cell_len(setting) > asked else []
    told.append(harmless(switch.evidence))
    if switch.compared_run is not None:
        if switch.key in _CHANGE_THE_STEP:
            told.append(f"tokens/s {format_percent(switch.tokens_percent, signed=True)}")
        told += [harmless(switch.note)] if switch.note else []
        other = "" if in_row else f"{harmless(switch.compared_setting or '')}, "
        told.append(f"against {other}run {harmless(switch.compared_run)}")
    elif not switch.is_off:
        told += [] if in_row else [f"against {against.plain.strip()}"]
        told.append("no run differs in it alone")
    details = [Content.styled(row, "$muted") for row in wrapped("; ".join(told), width, "  ")]
    return [Content.assemble(change, against) if in_row else change, *details]


def _against(switch: Switch) -> Content:
    """How the other run, or the prediction, has the switch; a run by a part of the id in the row below."""
    if switch.compared_setting is None:
        return Content("")
    other = switch.compared_run
    run = f", run {short_ids((other,))[other]}" if other is not None else ""
    return Content.styled(f"  {harmless(switch.compared_setting + run)}", "$muted")


def _change(switch: Switch) -> Content:
    if switch.compared_run is not None:
        return Content.assemble(
            (fit_right(format_percent(switch.step_percent, signed=True), _TIME_CELLS), "bold"),
            (fit_right(format_bytes(switch.peak_bytes_change, signed=True), _PEAK_CELLS), "bold"),
        )
    if switch.predicted_bytes_change is not None:
        size = format_bytes(switch.predicted_bytes_change, signed=True)
        return Content.assemble((fit_right("predicted", _TIME_CELLS), "$muted"), fit_right(size, _PEAK_CELLS))
    return Content.styled(fit_right("not measured", _TIME_CELLS + _PEAK_CELLS), "$muted")

"""Time of a step: its phases, its speed, and how both went."""

from __future__ import annotations

from statistics import mean, median

from textual.app import ComposeResult
from textual.content import Content

from llmtop.profiler.flops import utilisation
from llmtop.profiler.rankstate import WARMUP_STEPS
from llmtop.profiler.series import steady_steps
from llmtop.profiler.units import NOT_AVAILABLE, format_percent, format_seconds, format_tokens_rate
from llmtop.tui.view import RunView, steady_speed
from llmtop.tui.widgets.paint import Segment, fit, fit_right, lines, sparkline, stacked
from llmtop.tui.widgets.palette import PHASES, REST
from llmtop.tui.widgets.panel import Panel
from llmtop.tui.widgets.plot import ORANGE, Curve, LinePlot

_ROWS_FOR_PLOT = 10
_SHORT = {"data": "data", "forward": "fwd", "backward": "bwd", "optimizer": "opt", "rest": "rest"}


class StepsPanel(Panel):
    TITLE = "Steps"
    KEY = "4"

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield LinePlot()

    def headline(self, view: RunView) -> str:
        speed = steady_speed(view.state.series)
        return format_tokens_rate(speed) if speed is not None else ""

    def draw(self, view: RunView, width: int, height: int) -> Content:
        series = view.state.series
        plot = self.query_one(LinePlot)
        plot.display = len(series.steps) > 1 and (self.zoomed or height >= _ROWS_FOR_PLOT)
        if not series.steps:
            return Content.styled("no step has finished yet", "$muted")
        if plot.display:
            plot.show([Curve(ORANGE, series.steps, series.step_seconds)])
        phases = _phases(view)
        seconds = sum(phases.values())
        bar = [Segment(swatch.letter, swatch.colour, phases[name]) for name, swatch in PHASES.items()]
        bar.append(Segment(REST.letter, REST.colour, phases["rest"]))
        rows = [_speed(view), stacked(bar, seconds or 1.0, width)]
        if self.zoomed:
            rows += [
                _utilisation(view),
                *_skipped(view),
                *_phase_table(view, phases),
                *_rank_rows(view),
                Content("step seconds:"),
            ]
            return lines(rows)
        rows += [_shares(phases, seconds, width), *_skipped(view)]
        if height > 4:
            rows.append(Content(""))
        if plot.display:
            return lines([*rows, Content("step seconds:")])
        rows.append(
            Content.assemble(
                ("step time ", "$muted"), (sparkline(series.step_seconds, width - 10, floor=0.0), "$primary")
            )
        )
        rows.append(_spread(view))
        return lines(rows[:height])


def _phases(view: RunView) -> dict[str, float]:
    """Seconds of each phase of rank 0 in a step after warm-up, and `rest`: what no phase covers."""
    rank = view.state.ranks.get(0)
    if rank is None or rank.last_step is None:
        return {**dict.fromkeys(PHASES, 0.0), "rest": 0.0}
    totals = {name: total for name, total in rank.phase_totals.items() if total.steps}
    steady = _steady(view)
    if totals and steady:
        known = {
            name: totals[name].seconds / totals[name].steps if name in totals else 0.0 for name in PHASES
        }
        seconds = mean(steady)
    else:
        known = {name: rank.last_step.phase_seconds.get(name) or 0.0 for name in PHASES}
        seconds = rank.last_step.step_seconds
    return {**known, "rest": max(0.0, seconds - sum(known.values()))}


def _steady(view: RunView) -> tuple[float, ...]:
    """Step times without the first ones, which compile and allocate and would hide how the others vary."""
    return tuple(seconds for seconds, _ in steady_steps(view.state.series, WARMUP_STEPS))


def _speed(view: RunView) -> Content:
    steady, predicted = _steady(view), view.prediction.step_seconds
    foretold = "" if predicted is None else f"   predicted {format_seconds(predicted)}"
    share = utilisation(view.spec, steady_speed(view.state.series))
    mfu = "" if share is None else f"   MFU {format_percent(100 * share.mfu)}"
    seconds = median(steady) if steady else view.state.series.step_seconds[-1]
    words = " a step" if steady else " a step, warming up"
    return Content.assemble((format_seconds(seconds), "bold"), words, mfu, (foretold, "$muted"))


def _utilisation(view: RunView) -> Content:
    """Both counts of the model's operations, as a share of the GPUs' dense peak."""
    share = utilisation(view.spec, steady_speed(view.state.series))
    if share is None:
        return Content.styled(f"MFU {NOT_AVAILABLE}", "$muted")
    needed = format_percent(100 * share.needed)
    words = f"MFU {format_percent(100 * share.mfu)} by PaLM's count, {needed} by needed products"
    return Content.styled(words, "$muted")


def _skipped(view: RunView) -> list[Content]:
    """fp16: steps that changed nothing because gradients overflowed, and the scale of the loss by now."""
    state = view.state
    last = state.ranks[0].last_step if 0 in state.ranks else None
    scale = last.loss_scale if last is not None else None
    if not state.skipped_steps and scale is None:
        return []
    words = f"{state.skipped_steps} of {state.steps_finished} steps skipped"
    style = "$text-warning" if last is not None and last.skipped else "$muted"
    return [Content.styled(words + ("" if scale is None else f", loss scale {scale:,.10g}"), style)]


def _shares(phases: dict[str, float], seconds: float, width: int) -> Content:
    """Each phase's letter, short name and share."""
    whole = seconds or 1.0
    cells = [f"{_SHORT[name]} {phases[name] / whole:.0%}" for name in phases]
    return Content.styled(fit(" ".join(cells), width), "$muted")


def _spread(view: RunView) -> Content:
    steady = _steady(view)
    spread = f"{format_seconds(min(steady))} to {format_seconds(max(steady))}" if steady else NOT_AVAILABLE
    words = f"{spread} after warm-up"
    return Content.styled(words, "$muted")


def _phase_table(view: RunView, phases: dict[str, float]) -> list[Content]:
    whole = sum(phases.values()) or 1.0
    labels = {**{name: swatch.label for name, swatch in PHASES.items()}, "rest": "rest"}
    letters = {**{name: swatch.letter for name, swatch in PHASES.items()}, "rest": REST.letter}
    last = view.state.ranks[0].last_step if 0 in view.state.ranks else None
    rows = []
    for name, seconds in phases.items():
        missing = name != "rest" and (last is None or last.phase_seconds.get(name) is None)
        shown = "n/a" if missing else format_seconds(seconds)
        rows.append(
            Content.assemble(
                (f"{letters[name]} ", "$muted"),
                fit(labels[name], 12),
                fit_right(shown, 10),
                (fit_right("" if missing else f"{seconds / whole:.0%}", 6), "$muted"),
            )
        )
    return rows


def _rank_rows(view: RunView) -> list[Content]:
    """The slowest and the fastest rank of the newest step, where there are several."""
    last = {rank: r.last_step for rank, r in view.state.ranks.items() if r.last_step is not None}
    if len(last) < 2:
        return []
    worked = {
        rank: sum(seconds or 0.0 for seconds in step.phase_seconds.values()) or step.step_seconds
        for rank, step in last.items()
    }
    slow, fast = max(worked, key=lambda r: worked[r]), min(worked, key=lambda r: worked[r])
    slowest, fastest = format_seconds(worked[slow]), format_seconds(worked[fast])
    return [Content.styled(f"slowest rank {slow} {slowest}, fastest rank {fast} {fastest}", "$muted")]

"""Time of a step: its phases, its speed, and how both went."""

from __future__ import annotations

from statistics import mean, median
from typing import NamedTuple

from llmtop.profiler.cost.flops import utilisation
from llmtop.profiler.fold.rankstate import WARMUP_STEPS, RankState
from llmtop.profiler.fold.series import Series, mean_rate, middle_half, steady_steps
from llmtop.profiler.record.stepevents import BEFORE_FORWARD, BETWEEN
from llmtop.profiler.report.toldsteps import told_steps_words
from llmtop.profiler.units import (
    NOT_AVAILABLE,
    format_percent,
    format_range,
    format_seconds,
    format_tokens_rate,
)
from llmtop.tui.feeds.view import RunView, steady_speed
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.curves import ORANGE, Curve
from llmtop.tui.widgets.paint import Segment, fit, fit_right, lines, sparkline, stacked, wrapped
from llmtop.tui.widgets.palette import PHASES, REST
from llmtop.tui.widgets.picture import Picture

_ROWS_FOR_PLOT = 10
_RANK_CELLS, _TIME_CELLS, _FEWEST_BAR_CELLS = 6, 10, 8
_UNEVEN = 1.1
_RECENT_STEPS = 20
_LETTER = {**{name: swatch.letter for name, swatch in PHASES.items()}, "rest": "rest"}
_SHORT = {
    "data": "data",
    BETWEEN: "between",
    "forward": "fwd",
    "backward": "bwd",
    "optimizer": "opt",
    "rest": "rest",
}


class _Pace(NamedTuple):
    """What tells how fast the run is, walked through once a picture."""

    series: Series
    steady: tuple[tuple[float, float | None], ...]
    """Of the steps after the first ones, which compile and allocate and would hide how the others vary."""

    @property
    def tokens_per_second(self) -> float | None:
        return mean_rate(self.steady)

    @property
    def step_seconds(self) -> list[float]:
        return [seconds for seconds, _ in self.steady]


class StepsPanel(Picture):
    TITLE = "Steps"
    KEY = "4"

    def plot(self, curves: list[Curve]) -> None:
        """Below the text, where a widget shows it; without any, the plot goes."""

    def headline(self, view: RunView) -> str:
        speed = steady_speed(view.state.speed_series)
        return format_tokens_rate(speed) if speed is not None else ""

    def draw(self, view: RunView, width: int, height: int) -> Content:
        series = view.state.series
        is_plotted = len(series.steps) > 1 and (self.zoomed or height >= _ROWS_FOR_PLOT)
        self.plot([Curve(ORANGE, series.steps, series.step_seconds)] if is_plotted else [])
        if not series.steps:
            return Content.styled("no step has finished yet", "$muted")
        newest = view.state.speed_series
        pace = _Pace(newest, steady_steps(newest, WARMUP_STEPS))
        if not newest.steps:
            return lines([Content.styled(_none_since(view), "$muted"), _history(series, width, is_plotted)])
        phases = _phases(view, pace)
        seconds = sum(phases.values())
        bar = _segments(phases)
        bar.append(Segment(REST.letter, REST.colour, phases["rest"]))
        rows = [_speed(view, pace, width), stacked(bar, seconds or 1.0, width)]
        if self.zoomed:
            rows += [
                _utilisation(view, pace),
                _rates(view, pace),
                *_skipped(view),
                *_phase_table(view, phases),
                *_marked(view),
                *_rank_rows(view, phases, width),
                _history(series, width, is_plotted=True),
            ]
            return lines(rows)
        rows += [_shares(phases, seconds, width), *_skipped(view)]
        if height > 4:
            rows.append(Content(""))
        rows.append(_history(series, width, is_plotted))
        if is_plotted:
            return lines(rows)
        rows.append(_spread(pace))
        return lines(rows[:height])


def _none_since(view: RunView) -> str:
    """Why there are no times although steps were made: of earlier processes or of another setting."""
    since = "it went on" if view.state.made_no_step else "the change"
    return f"no step has finished since {since}"


def _history(series: Series, width: int, is_plotted: bool) -> Content:
    """How step times went; of a plot the line above it."""
    if is_plotted:
        return Content("step seconds:")
    drawn = sparkline(series.step_seconds, width - 10, floor=0.0)
    return Content.assemble(("step time ", "$muted"), (drawn, "$primary"))


def _phases(view: RunView, pace: _Pace) -> dict[str, float]:
    """Seconds of each phase of the first rank in a step after warm-up, and `rest`: what no phase covers."""
    rank, names = view.state.first, _told(view)
    if rank is None or rank.last_step is None:
        return {**dict.fromkeys(names, 0.0), "rest": 0.0}
    totals = {name: total for name, total in rank.phase_totals.items() if total.steps}
    steady = pace.step_seconds
    if totals and steady:
        known = {name: totals[name].seconds / totals[name].steps if name in totals else 0.0 for name in names}
        seconds = mean(steady)
    else:
        known = {name: rank.phase_seconds.get(name) or 0.0 for name in names}
        seconds = rank.last_step.step_seconds
    return {**known, "rest": max(0.0, seconds - sum(known.values()))}


def _told(view: RunView) -> list[str]:
    """The phases that the panel shows: `BETWEEN` only where a rank tells it."""
    is_told = any(BETWEEN in _means(rank) for rank in view.state.ranks.values())
    return [name for name in PHASES if name != BETWEEN or is_told]


def _segments(phases: dict[str, float]) -> list[Segment]:
    return [Segment(swatch.letter, swatch.colour, phases.get(name, 0.0)) for name, swatch in PHASES.items()]


def _speed(view: RunView, pace: _Pace, width: int) -> Content:
    steady, predicted = pace.step_seconds, view.prediction.step_seconds
    foretold = "" if predicted is None else f"predicted {format_seconds(predicted)}"
    share = utilisation(view.spec, pace.tokens_per_second)
    mfu = "" if share is None else f"   MFU {format_percent(100 * share.mfu)}"
    seconds = median(steady) if steady else pace.series.step_seconds[-1]
    words = " a step" if steady else " a step so far"
    # Of several ways the first that fits: what is left out stands in the opened panel.
    ways = (
        Content.assemble((format_seconds(seconds), "bold"), words, f"{mfu}   ", (foretold, "$muted")),
        Content.assemble((format_seconds(seconds), "bold"), words, mfu),
        Content.assemble((format_seconds(seconds), "bold"), " a step"),
    )
    return next((way for way in ways if way.cell_length <= width), ways[-1])


def _utilisation(view: RunView, pace: _Pace) -> Content:
    """Both counts of the model's operations, as a share of the GPUs' dense peak."""
    share = utilisation(view.spec, pace.tokens_per_second)
    if share is None:
        return Content.styled(f"MFU {NOT_AVAILABLE}", "$muted")
    needed = format_percent(100 * share.needed)
    words = f"MFU {format_percent(100 * share.mfu)} by PaLM's count, {needed} by needed products"
    return Content.styled(words, "$muted")


def _rates(view: RunView, pace: _Pace) -> Content:
    """Tokens a second over all steps and over the last ones, and how much the steps differ."""
    newest = [rate for rate in pace.series.tokens_per_second[-_RECENT_STEPS:] if rate is not None]
    words = f"{format_tokens_rate(pace.tokens_per_second)} after the first {WARMUP_STEPS}"
    if newest:
        words += f", {format_tokens_rate(median(newest))} lately"
    predicted = view.prediction.tokens_per_second
    if predicted is not None:
        words += f", predicted {format_tokens_rate(predicted)}"
    half = middle_half(pace.steady)
    if half is not None:
        between = format_range(format_seconds(half.low_seconds), format_seconds(half.high_seconds))
        words += f"; middle half of the steps {between}"
    return Content.styled(words, "$muted")


def _skipped(view: RunView) -> list[Content]:
    """fp16: steps that changed nothing because gradients overflowed, and the scale of the loss by now."""
    state = view.state
    last = state.first.last_step if state.first is not None else None
    scale = last.loss_scale if last is not None else None
    if not state.skipped_steps and scale is None:
        return []
    words = f"{state.skipped_steps} of {state.steps_made} steps skipped"
    style = "$text-warning" if last is not None and last.skipped else "$muted"
    return [Content.styled(words + ("" if scale is None else f", loss scale {scale:,.10g}"), style)]


def _shares(phases: dict[str, float], seconds: float, width: int) -> Content:
    """Each phase's share, by its short name or its letter in the bar."""
    whole = seconds or 1.0
    told = {name: f"{phases[name] / whole:.0%}" for name in phases}
    shown = [name for name in phases if name != "rest" or told[name] != "0%"]
    ways = (" ".join(f"{names[name]} {told[name]}" for name in shown) for names in (_SHORT, _LETTER))
    words = next((way for way in ways if len(way) <= width), "")
    return Content.styled(words or fit(" ".join(told.values()), width), "$muted")


def _spread(pace: _Pace) -> Content:
    steady = pace.step_seconds
    spread = NOT_AVAILABLE
    if steady:
        spread = format_range(format_seconds(min(steady)), format_seconds(max(steady)))
    words = f"{spread} after the first {WARMUP_STEPS}"
    return Content.styled(words, "$muted")


def _marked(view: RunView) -> list[Content]:
    """Of how many steps the phases are, where not all tell them."""
    words = told_steps_words(view.state.first)
    return [Content.styled(f"phases: {words}", "$muted")] if words else []


def _phase_table(view: RunView, phases: dict[str, float]) -> list[Content]:
    whole = sum(phases.values()) or 1.0
    labels = {**{name: swatch.label for name, swatch in PHASES.items()}, "rest": "rest"}
    letters = {**{name: swatch.letter for name, swatch in PHASES.items()}, "rest": REST.letter}
    known = view.state.first.phase_seconds if view.state.first is not None else {}
    rows = []
    for name, seconds in phases.items():
        missing = name != "rest" and known.get(name) is None
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


def _rank_rows(view: RunView, phases: dict[str, float], width: int) -> list[Content]:
    """Each rank's phases in a step after warm-up; the rank that all wait for is named. `phases` are those
    that are told of the first rank, and `rest`."""
    means = {number: _means(rank) for number, rank in sorted(view.state.ranks.items())}
    means = {number: spent for number, spent in means.items() if spent}
    if len(means) < 2:
        return []
    names = [name for name in phases if name != "rest"]
    by_itself = [name for name in names if name in (*BEFORE_FORWARD, "forward")]
    alone = {n: sum(spent.get(name, 0.0) for name in by_itself) for n, spent in means.items()}
    what = f"what a rank does alone ({', '.join(by_itself)})"
    slow = max(alone, key=lambda r: alone[r])
    fast = min((r for r in alone if r != slow), key=lambda r: alone[r])
    scale = max(sum(spent.values()) for spent in means.values())
    spread = format_seconds(alone[slow] - alone[fast])
    behind = f"{spread} behind rank {fast} in {what}"
    if alone[slow] > alone[fast]:
        words = f"by rank; slowest rank {slow}, {behind}"
    else:
        words = f"by rank; no slowest rank: all alike in {what}"
    rows = [Content.styled(row, "$muted") for row in wrapped(words, width)]
    head = fit("rank", _RANK_CELLS) + "".join(fit_right(_SHORT[name], _TIME_CELLS) for name in names)
    rows.append(Content.styled(head, "$muted"))
    bar_cells = width - _RANK_CELLS - _TIME_CELLS * len(names) - 1
    for number, spent in means.items():
        cells = "".join(fit_right(format_seconds(spent.get(name)), _TIME_CELLS) for name in names)
        mark = "$text-warning" if number == slow and _apart(alone, slow) else "$foreground"
        rows.append(
            Content.assemble(
                (fit(str(number), _RANK_CELLS) + cells + " ", mark),
                stacked(_segments(spent), scale, bar_cells) if bar_cells >= _FEWEST_BAR_CELLS else "",
            )
        )
    return rows


def _apart(alone: dict[int, float], slow: int) -> bool:
    """Whether the slowest rank is so far behind that it is worth a colour."""
    others = [seconds for number, seconds in alone.items() if number != slow]
    return alone[slow] > _UNEVEN * median(others)


def _means(rank: RankState) -> dict[str, float]:
    """Seconds of each phase; of the newest step that tells them while none after warm-up is there."""
    steady = {name: t.seconds / t.steps for name, t in rank.phase_totals.items() if t.steps}
    if steady:
        return steady
    return {name: seconds for name, seconds in rank.phase_seconds.items() if seconds is not None}

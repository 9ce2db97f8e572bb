"""The plots of a run's page: memory by moment, the timeline, links, training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llmtop.profiler.memory.result import MOMENT_WORDS, Component
from llmtop.profiler.record.stepevents import BETWEEN
from llmtop.profiler.report.envelope import Envelope
from llmtop.profiler.report.history import ALL
from llmtop.profiler.report.markup import Markup, element, figure, joined
from llmtop.profiler.report.pagedata import PageData
from llmtop.profiler.report.svg import Bar, Line, Plot, bars_svg, legend, plot_svg
from llmtop.profiler.units import figures as three_figures
from llmtop.profiler.units import format_bytes, format_seconds

GIB = float(1024**3)
MIB = float(1024**2)
_COLOUR: dict[str, int] = {
    Component.PARAMETERS: 0,
    Component.GRADIENTS: 1,
    Component.OPTIMIZER_STATE: 2,
    Component.MASTER_PARAMETERS: 3,
    Component.ACTIVATIONS: 4,
    Component.LOGITS: 5,
    Component.COMMUNICATION_BUFFERS: 6,
    Component.WORKSPACE: 7,
    Component.RUNTIME: 8,
    Component.ROUNDING: 9,
    Component.FRAGMENTATION: 9,
    Component.UNEXPLAINED: 10,
}
_OTHER_COLOUR = 11
_PHASE_COLOURS = {"data": 8, BETWEEN: 9, "forward": 0, "backward": 1, "optimizer": 2}
_LINKS = (
    ("NVLink, sent", "nvlink_tx_bytes_per_second"),
    ("NVLink, received", "nvlink_rx_bytes_per_second"),
    ("PCIe, sent", "pcie_tx_bytes_per_second"),
    ("PCIe, received", "pcie_rx_bytes_per_second"),
)


def memory_by_moment(data: PageData) -> Markup:
    """Two bars a moment: what was predicted, and what a rank held."""
    measured = {moment.name: moment for moment in data.measured}
    named = {str(moment.name): moment for moment in data.predicted}
    bars: list[Bar] = []
    for name in dict.fromkeys((*named, *measured)):
        words = MOMENT_WORDS.get(name, name.replace("_", " "))
        if name in named:
            bars.append(_bar(f"{words}, predicted", named[name].components, named[name].total_bytes))
        if name in measured:
            seen = measured[name]
            name_of = "measured" if name in named else f"{words}, measured"
            bars.append(_bar(name_of, seen.components, seen.total_bytes, pale=True))
    parts = dict.fromkeys(name for bar in bars for name, _, _ in bar.parts)
    keys = legend([(name, component_colour(name.replace(" ", "_"))) for name in parts])
    return figure(
        "Memory by moment of a step" + ("" if data.measured_rank is None else f", rank {data.measured_rank}"),
        bars_svg("Memory by moment", bars, format_bytes),
        Markup(keys),
    )


def _bar(
    name: str, parts: Mapping[Component, int] | Mapping[str, int], total: int, *, pale: bool = False
) -> Bar:
    order = {str(component): at for at, component in enumerate(Component)}
    # A newer version may have written one that is not known here.
    ordered = sorted(parts.items(), key=lambda part: order.get(part[0], len(order)))
    return Bar(
        name=name,
        parts=tuple((part.replace("_", " "), size, component_colour(part)) for part, size in ordered),
        total=format_bytes(total),
        pale=pale,
    )


def component_colour(component: str) -> int:
    return _COLOUR.get(component, _OTHER_COLOUR)


def timeline(data: PageData) -> Markup:
    """Memory and the phases of the steps over the same time."""
    history = data.history
    memory = history.devices.get("memory_used_bytes", {})
    total = max((device.total_bytes or 0 for device in data.report.devices), default=0)
    span = _span(data)
    marks = _change_times(data)
    parts = [
        _over_time("Device memory (NVML)", _lines(memory, "GPU"), span, marks, limit=_limit(total)),
        _over_time("Memory of the ranks' processes", _lines(history.processes, "rank"), span, marks),
        _over_time("Memory in use on the machine", _lines({ALL: history.host_bytes}, "host"), span, marks),
        _phases(data, span, marks),
        _percent(data, span, marks),
    ]
    return joined(part for part in parts if part)


def _over_time(
    title: str,
    lines: tuple[Line, ...],
    span: tuple[float, float] | None,
    marks: tuple[tuple[float, str], ...],
    *,
    limit: tuple[float, str] | None = None,
) -> Markup:
    """Bytes over time."""
    highest = max((max(line.envelope.high) for line in lines if line.envelope.x), default=0.0)
    # A limit far above says less than the curve that it would flatten.
    shown = limit if limit is not None and highest > 0.3 * limit[0] else None
    plot = Plot(
        title=title,
        lines=lines,
        x_label=format_seconds_short,
        y_label=format_bytes,
        x_title="time since the beginning",
        x_unit=_time_unit(span),
        y_unit=GIB if highest >= 2 * GIB else MIB,
        marks=marks,
        limit=shown,
        x_range=span,
    )
    return figure(title, plot_svg(plot), _keys(lines))


def _phases(data: PageData, span: tuple[float, float] | None, marks: tuple[tuple[float, str], ...]) -> Markup:
    lines = tuple(
        Line(name=name, envelope=data.history.phases[name], colour=_PHASE_COLOURS.get(name, _OTHER_COLOUR))
        for name in dict.fromkeys((*_PHASE_COLOURS, *data.history.phases))
        if name in data.history.phases
    )
    plot = Plot(
        title="Phases of a step",
        lines=lines,
        x_label=format_seconds_short,
        y_label=format_seconds,
        x_title="time since the beginning",
        x_unit=_time_unit(span),
        marks=marks,
        x_range=span,
        stacked=True,
    )
    return figure("Phases of a step, rank 0", plot_svg(plot), _keys(lines))


def _percent(
    data: PageData, span: tuple[float, float] | None, marks: tuple[tuple[float, str], ...]
) -> Markup:
    lines = _lines(data.history.devices.get("utilization_percent", {}), "GPU")
    title = "GPU utilization"
    if not lines:
        lines, title = _lines({ALL: data.history.cpu_percent}, "CPU"), "CPU of the machine"
    plot = Plot(
        title=title,
        lines=lines,
        x_label=format_seconds_short,
        y_label=lambda value: f"{value:g}%",
        x_title="time since the beginning",
        x_unit=_time_unit(span),
        marks=marks,
        x_range=span,
    )
    return figure(title, plot_svg(plot), _keys(lines))


def links(data: PageData) -> Markup:
    """A plot of each kind of link and direction that carried anything."""
    span, marks = _span(data), _change_times(data)
    parts = []
    for title, name in _LINKS:
        lines = _lines(data.history.devices.get(name, {}), "GPU")
        highest = max((max(line.envelope.high) for line in lines if line.envelope.x), default=0.0)
        plot = Plot(
            title=title,
            lines=lines if highest > 0 else (),
            x_label=format_seconds_short,
            y_label=lambda value: f"{format_bytes(value)}/s",
            x_title="time since the beginning",
            x_unit=_time_unit(span),
            y_unit=GIB if highest >= 2 * GIB else MIB,
            marks=marks,
            limit=_link_limit(data, name, highest),
            x_range=span,
        )
        parts.append(figure(title, plot_svg(plot), _keys(lines)))
    return joined(parts)


def _link_limit(data: PageData, name: str, highest: float) -> tuple[float, str] | None:
    """What the NVLinks of a GPU can carry each way, where that would not flatten the curve."""
    topology = data.state.topology
    if topology is None or not name.startswith("nvlink"):
        return None
    speeds = [d.nvlink_bytes_per_second for d in topology.devices if d.nvlink_bytes_per_second]
    if not speeds or highest < 0.3 * max(speeds):
        return None
    return max(speeds), "all links of a GPU"


def training(data: PageData) -> Markup:
    titles = {
        "loss": ("Loss", three_figures),
        "learning_rate": ("Learning rate", three_figures),
        "grad_norm": ("Norm of the gradient", three_figures),
        "step_seconds": ("Step time", format_seconds),
    }
    marks = tuple(
        (float(change.step), f"step {change.step}: {change.what}")
        for change in data.report.changes
        if change.step is not None
    )
    parts = []
    for name, (title, label) in titles.items():
        envelope = data.history.steps.get(name, Envelope())
        plot = Plot(
            title=title,
            lines=(Line(name=title, envelope=envelope, colour=0),),
            x_label=lambda value: f"{value:,.0f}",
            y_label=label,
            x_title="step",
            from_zero=name != "loss",
            marks=marks,
        )
        parts.append(figure(title, plot_svg(plot)))
    if any(envelope.is_thinned for envelope in data.history.steps.values()):
        note = "Of each part of a long run the band shows the least and the largest value, the line the mean."
        parts.append(element("p", note, kind="dim"))
    return joined(parts)


_UNITS = ((60.0, "m", 180.0), (3600.0, "h", 3 * 3600.0), (86400.0, "d", 4 * 86400.0))
"""Seconds, sign, and from how long a span on it is used."""


def _time_unit(span: tuple[float, float] | None) -> float:
    long = span[1] - span[0] if span is not None else 0.0
    return max((seconds for seconds, _, enough in _UNITS if long >= enough), default=1.0)


def format_seconds_short(value: float) -> str:
    """Of an axis: `40s`, `15m`, `2.5h`."""
    for seconds, sign, enough in reversed(_UNITS):
        if value >= enough / 6 and (value / seconds * 100).is_integer() and value >= seconds / 2:
            return f"{value / seconds:g}{sign}"
    return f"{value:g}s"


def _lines(series: Mapping[int, Envelope], what: str) -> tuple[Line, ...]:
    return tuple(
        Line(
            name=f"{what} {number}" if number != ALL else ("" if what in ("host", "CPU") else f"all {what}s"),
            envelope=envelope,
            colour=max(0, number) if number != ALL else 0,
        )
        for number, envelope in series.items()
        if envelope.x
    )


def _keys(lines: Sequence[Line]) -> Markup:
    """A single line needs no name but its title."""
    named = [(line.name, line.colour) for line in lines if line.name]
    return Markup(legend(named)) if len(named) > 1 else Markup("")


def _limit(total: int) -> tuple[float, str] | None:
    return (float(total), f"memory of a GPU: {format_bytes(total)}") if total else None


def _span(data: PageData) -> tuple[float, float] | None:
    """One axis of time for all plots."""
    return (0.0, data.report.seconds) if data.report.seconds else None


def _change_times(data: PageData) -> tuple[tuple[float, str], ...]:
    return tuple(_marks(data))


def _marks(data: PageData) -> Iterator[tuple[float, str]]:
    began = data.history.began
    for record, change in zip(data.state.changes.records, data.report.changes, strict=True):
        if began is not None and change.status == "applied":
            yield max(0.0, record.at - began), f"{change.what}: {change.outcome}"

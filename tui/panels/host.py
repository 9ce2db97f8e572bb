"""The machine's memory, its limits and when they are met, each rank's process, what offload takes, disks."""

from __future__ import annotations

from llmtop.profiler.breakdown import process_peaks
from llmtop.profiler.findings.host import growth
from llmtop.profiler.findings.processors import work_words
from llmtop.profiler.fold.othersuse import others_share
from llmtop.profiler.fold.runstate import ENDED
from llmtop.profiler.forecast import Forecast
from llmtop.profiler.record.deviceevents import HostSample
from llmtop.profiler.record.events import HardwareSampled
from llmtop.profiler.units import (
    counted,
    format_bytes,
    format_percent,
    format_range,
    format_rate,
    format_seconds,
)
from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import (
    area,
    fit,
    fit_right,
    gauge,
    harmless,
    lines,
    sparkline,
    stretched,
    used_of,
)
from llmtop.tui.widgets.picture import Picture

_LABEL_CELLS = 7
_NUMBER_CELLS = 18
_TIME_ROWS = 4
_RATE_CELLS = 14
_PROCESS_CELLS = 11


class HostPanel(Picture):
    TITLE = "Host"
    KEY = "5"

    def headline(self, view: RunView) -> tuple[str, ...]:
        busy = view.state.hardware.host.cpu_percent if view.state.hardware else None
        words = "" if busy is None else f"CPU {busy:.0f}%"
        told = growth(view.state)
        if told is None or told.seconds is None or view.state.status in ENDED:
            return (words,)
        return (f"{words}  full in {format_seconds(told.seconds)}", f"full in {format_seconds(told.seconds)}")

    def draw(self, view: RunView, width: int, height: int) -> Content:
        sample = view.state.hardware
        if sample is None:
            return Content.styled("no sample yet", "$muted")
        host = sample.host
        rows = [_machine_row(host, width), _cgroup_row(host, width), _offload_row(view), _disk_row(host)]
        if self.zoomed:
            swap = Content.assemble((fit("swap", _LABEL_CELLS), "$muted"), format_bytes(host.swap_used_bytes))
            return lines(
                [
                    *rows[:2],
                    swap,
                    *_processor_rows(sample),
                    *_forecast_rows(view),
                    Content(""),
                    *_over_time(view, width),
                    Content(""),
                    *_offload_rows(view),
                    *_rate_rows(view, width),
                    Content(""),
                    *_process_table(view),
                ]
            )
        if height < 4:
            # Without offload that row says nothing that a person waits for.
            rows.pop(2 if view.prediction.host_bytes == 0 or view.spec.on_cpu else 3)
        return lines(rows[: max(height, 1)])


def _gauge_row(label: str, used: int | None, total: int | None, width: int) -> Content:
    cells = width - _LABEL_CELLS - 1 - _NUMBER_CELLS
    fraction = used / total if used is not None and total else None
    numbers = used_of(used, total) + ("" if fraction is None else f" {fraction:4.0%}")
    return Content.assemble(
        (fit(label, _LABEL_CELLS), "$muted"), gauge(fraction, cells), " ", fit_right(numbers, _NUMBER_CELLS)
    )


def _machine_row(host: HostSample, width: int) -> Content:
    total, available = host.memory_total_bytes, host.memory_available_bytes
    used = total - available if total is not None and available is not None else None
    return _gauge_row("RAM", used, total, width)


def _cgroup_row(host: HostSample, width: int) -> Content:
    if host.cgroup_limit_bytes is None:
        words = "no memory limit"
        if host.cgroup_used_bytes is not None:
            words = f"{format_bytes(host.cgroup_used_bytes)} used, no limit"
        return Content.assemble((fit("cgroup", _LABEL_CELLS), "$muted"), words)
    return _gauge_row("cgroup", host.cgroup_used_bytes, host.cgroup_limit_bytes, width)


def _offloads(view: RunView) -> bool:
    options = view.spec.options
    return options.offload_optimizer != "none" or options.offload_param != "none"


def _offload_row(view: RunView) -> Content:
    predicted = view.prediction
    if not _offloads(view):
        words = "no offload"
    else:
        words = f"offload {format_bytes(predicted.host_bytes)} predicted"
        if predicted.pinned_bytes:
            words += f", {format_bytes(predicted.pinned_bytes)} pinned"
        if predicted.nvme_bytes:
            words += f", NVMe {format_bytes(predicted.nvme_bytes)}"
    return Content.assemble((fit("", _LABEL_CELLS), "$muted"), words)


def _disk_row(host: HostSample) -> Content:
    read, write = format_rate(host.disk_read_bytes_per_second), format_rate(host.disk_write_bytes_per_second)
    return Content.assemble(
        (fit("disk", _LABEL_CELLS), "$muted"), ("r ", "$muted"), read, ("   w ", "$muted"), write
    )


# --- the whole screen -----------------------------------------------------------------------------


def _processor_rows(sample: HardwareSampled) -> list[Content]:
    """Who has the processors, and what holds the ranks back from them."""
    host, share = sample.host, others_share(sample)
    if host.cpu_percent is None or not host.cpu_count:
        return []
    words = f"{host.cpu_percent / 100 * host.cpu_count:.1f} of {counted(host.cpu_count, 'processor')} busy"
    if share is not None:
        named = work_words(host)
        words += f", {share / 100 * host.cpu_count:.1f} of them for others{f': {named}' if named else ''}"
    rows = [Content.assemble((fit("CPU", _LABEL_CELLS), "$muted"), harmless(words))]
    if host.cpu_limit_cores is not None:
        words = f"limit {host.cpu_limit_cores:g} processors"
        if host.cpu_throttled_percent is not None:
            words += f", used up in {format_percent(host.cpu_throttled_percent, digits=0)} of its periods"
        rows.append(Content.assemble((fit("", _LABEL_CELLS), "$muted"), words))
    return rows


def _forecast_rows(view: RunView) -> list[Content]:
    """Minutes to the limit, from the slope of the last minutes after warm-up."""
    if view.state.status in ENDED:
        return []
    told = growth(view.state)
    if told is None:
        words, style = "n/a: too few samples after the first steps", "$muted"
    elif told.seconds is None:
        words, style = f"no growth that stands out{_slope_words(told)}", "$muted"
    else:
        between = format_range(format_seconds(told.earliest_seconds), format_seconds(told.latest_seconds))
        words = f"{told.limit} full in {format_seconds(told.seconds)} ({between}){_slope_words(told)}"
        style = "$text-warning"
    return [Content.assemble((fit("ahead", _LABEL_CELLS), "$muted"), (words, style))]


def _slope_words(told: Forecast) -> str:
    a_minute, error = told.slope.per_second * 60, told.slope.error * 60
    return f", {format_bytes(a_minute, signed=True)} a minute, give or take {format_bytes(2 * error)}"


def _over_time(view: RunView, width: int) -> list[Content]:
    points = view.state.memory_trail.points
    sample = view.state.hardware
    known = [point.host_bytes for point in points]
    total = sample.host.memory_total_bytes if sample is not None else None
    if len(points) < 2 or not any(known) or not total:
        return []
    words = f"RAM over {format_seconds(points[-1].t - points[0].t)}; top {format_bytes(total)}"
    return [Content.styled(words, "$muted"), *area(known, width, _TIME_ROWS, float(total))]


def _offload_rows(view: RunView) -> list[Content]:
    """What offload was predicted to take of the host, part by part, and what the ranks were seen to hold."""
    rows = [_offload_row(view)]
    if not _offloads(view):
        return rows
    held: dict[str, int] = {}
    for rank in view.state.ranks.values():
        newest = max(rank.classified.values(), key=lambda e: (e.step, e.t), default=None)
        for name, size in newest.host_components.items() if newest is not None else ():
            held[name] = held.get(name, 0) + size
    predicted = view.prediction.host.components
    names = sorted({*held, *predicted}, key=lambda name: -max(held.get(name, 0), predicted.get(name, 0)))
    if names:
        head = fit("", 24) + fit_right("predicted", 12) + fit_right("actual", 12)
        rows.append(Content.styled(head, "$muted"))
    for name in names:
        pair = (predicted.get(name), held.get(name))
        cells = "".join(fit_right(format_bytes(size), 12) for size in pair)
        rows.append(Content(fit(name.replace("_", " "), 24) + cells))
    return [*rows, Content("")]


def _rate_rows(view: RunView, width: int) -> list[Content]:
    """Disks and NVMe drives, now and over the samples that are kept."""
    rows = []
    for label, read, write in (
        ("disks", "disk_read_bytes_per_second", "disk_write_bytes_per_second"),
        ("NVMe", "nvme_read_bytes_per_second", "nvme_write_bytes_per_second"),
    ):
        for word, name in (("read", read), ("write", write)):
            rates = [getattr(sample.host, name) for sample in view.state.hardware_history]
            newest = rates[-1] if rates else None
            cells = width - _LABEL_CELLS - 6 - _RATE_CELLS - 1
            # Drawn only where something moved: a flat line of zeros says nothing.
            drawn = sparkline(stretched(rates, cells), cells, floor=0.0) if any(rates) else ""
            rows.append(
                Content.assemble(
                    (fit(label, _LABEL_CELLS) + fit(word, 6), "$muted"),
                    fit_right(format_rate(newest), _RATE_CELLS) + " ",
                    (drawn, "$primary"),
                )
            )
    measured = view.state.nvme
    if measured is not None and measured.read_bytes_per_second is not None:
        can = f"read {format_rate(measured.read_bytes_per_second)}, "
        can += f"write {format_rate(measured.write_bytes_per_second)}"
        words = f"{fit('', _LABEL_CELLS)}the offload folder was measured at: {can}"
        rows.append(Content.styled(words, "$muted"))
    return rows


def _process_table(view: RunView) -> list[Content]:
    processes = view.state.hardware.processes if view.state.hardware else ()
    head = "".join(
        fit_right(word, _PROCESS_CELLS) for word in ("RSS", "peak RSS", "PSS", "peak PSS", "CPU", "waits")
    )
    peaks = process_peaks(view.state, view.spec)
    rows = [Content.styled(fit("rank", 6) + head, "$muted")]
    for process in processes:
        cells = (
            format_bytes(process.rss_bytes),
            format_bytes(peaks.get(process.rank)),
            format_bytes(process.pss_bytes),
            format_bytes(view.state.peak_pss_bytes.get(process.rank)),
            format_percent(process.cpu_percent, digits=0),
            format_percent(process.cpu_wait_percent, digits=0),
        )
        rows.append(
            Content(fit(str(process.rank), 6) + "".join(fit_right(cell, _PROCESS_CELLS) for cell in cells))
        )
        if process.compiler_rss_bytes:
            words = f"{format_bytes(process.compiler_rss_bytes)} of it in compilers of ops, in no peak"
            rows.append(Content.styled(fit("", 6) + words, "$muted"))
    return rows

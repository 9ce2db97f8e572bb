"""The machine's memory, its limits, what offload takes of it, each rank's process, disk rates."""

from __future__ import annotations

from textual.content import Content

from llmtop.profiler.breakdown import process_peaks
from llmtop.profiler.deviceevents import HostSample
from llmtop.profiler.units import format_bytes, format_rate
from llmtop.tui.view import RunView
from llmtop.tui.widgets.paint import fit, fit_right, gauge, lines, used_of
from llmtop.tui.widgets.panel import Panel

_LABEL_CELLS = 7
_NUMBER_CELLS = 18


class HostPanel(Panel):
    TITLE = "Host"
    KEY = "5"

    def headline(self, view: RunView) -> str:
        busy = view.state.hardware.host.cpu_percent if view.state.hardware else None
        return "" if busy is None else f"CPU {busy:.0f}%"

    def draw(self, view: RunView, width: int, height: int) -> Content:
        sample = view.state.hardware
        if sample is None:
            return Content.styled("no sample yet", "$muted")
        host = sample.host
        rows = [_machine_row(host, width), _cgroup_row(host, width), _offload_row(view), _disk_row(host)]
        if self.zoomed:
            swap = Content.assemble((fit("swap", _LABEL_CELLS), "$muted"), format_bytes(host.swap_used_bytes))
            rows += [swap, Content(""), *_process_table(view)]
            return lines(rows)
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


def _offload_row(view: RunView) -> Content:
    options, predicted = view.spec.options, view.prediction
    if options.offload_optimizer == "none" and options.offload_param == "none":
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


def _process_table(view: RunView) -> list[Content]:
    processes = view.state.hardware.processes if view.state.hardware else ()
    head = "".join(fit_right(word, 12) for word in ("RSS", "peak RSS", "PSS", "peak PSS", "CPU"))
    peaks = process_peaks(view.state, view.spec)
    rows = [Content.styled(fit("rank", 6) + head, "$muted")]
    for process in processes:
        cells = (
            format_bytes(process.rss_bytes),
            format_bytes(peaks.get(process.rank)),
            format_bytes(process.pss_bytes),
            format_bytes(view.state.peak_pss_bytes.get(process.rank)),
            "n/a" if process.cpu_percent is None else f"{process.cpu_percent:.0f}%",
        )
        rows.append(Content(fit(str(process.rank), 6) + "".join(fit_right(cell, 12) for cell in cells)))
    return rows

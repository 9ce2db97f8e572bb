"""Memory of each GPU, or on the CPU kind of each rank's process, against its limit and the prediction."""

from __future__ import annotations

from msgspec.structs import replace

from llmtop.profiler.breakdown import process_peaks
from llmtop.profiler.fold.runstate import ENDED
from llmtop.profiler.record.deviceevents import DeviceSample, ProcessSample
from llmtop.profiler.units import format_bytes, format_seconds
from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.moments import moment_rows, phase_peak_rows
from llmtop.tui.widgets.paint import area, fit, fit_right, gauge, lines, sparkline, stretched, used_of
from llmtop.tui.widgets.picture import Picture

_LABEL_CELLS = 6
_NUMBER_CELLS = 18
_TIME_ROWS = 6


class MemoryPanel(Picture):
    TITLE = "Memory"
    KEY = "1"

    def headline(self, view: RunView) -> str:
        what = "rank process" if view.spec.on_cpu else "GPU"
        return f"largest per {what}" if view.state.status in ENDED else f"per {what}"

    def draw(self, view: RunView, width: int, height: int) -> Content:
        if view.state.status in ENDED:
            view = _with_peaks(view)
        rows = _process_rows(view, width) if view.spec.on_cpu else self._device_rows(view, width)
        if not rows:
            return Content.styled("no sample yet", "$muted")
        if self.zoomed:
            rows += [Content(""), *_over_time(view, width)]
            rows += [Content(""), *phase_peak_rows(view), Content(""), *moment_rows(view, width)]
        elif len(rows) > height > 1:
            rows = _compact_rows(view, width, height)
        return lines(rows)

    def _device_rows(self, view: RunView, width: int) -> list[Content]:
        devices = view.state.hardware.devices if view.state.hardware else ()
        predicted = _predicted(view)
        rows = []
        for device in devices:
            rows.append(_device_row(device, predicted, width))
            if self.zoomed:
                rows.append(_device_details(device, view.state.peak_device_bytes.get(device.index)))
        if rows:
            rows.append(Content.styled(f"┼ {_mark_words(view)} {format_bytes(predicted)}", "$muted"))
        return rows


def _with_peaks(view: RunView) -> RunView:
    """With the largest readings in place of the last one, which a run that has ended took while it left."""
    state, last = view.state, view.state.hardware
    if last is None:
        return view
    devices = tuple(
        replace(d, memory_used_bytes=state.peak_device_bytes.get(d.index, d.memory_used_bytes))
        for d in last.devices
    )
    processes = tuple(
        ProcessSample(rank=rank, rss_bytes=peak, pss_bytes=state.peak_pss_bytes.get(rank))
        for rank, peak in sorted(process_peaks(state, view.spec).items())
    )
    return replace(view, state=replace(state, hardware=replace(last, devices=devices, processes=processes)))


def _row(label: str, bar: Content, numbers: str) -> Content:
    return Content.assemble(fit(label, _LABEL_CELLS), bar, " ", (numbers, "$foreground"))


def _device_row(device: DeviceSample, predicted_bytes: int, width: int) -> Content:
    used, total = device.memory_used_bytes, device.memory_total_bytes
    bar_cells = width - _LABEL_CELLS - 1 - _NUMBER_CELLS
    numbers = fit_right(
        used_of(used, total) + (f" {used / total:4.0%}" if used and total else ""), _NUMBER_CELLS
    )
    if used is None or not total:
        return _row(f"GPU{device.index}", gauge(None, bar_cells), numbers)
    own = used if device.own_memory_bytes is None else min(device.own_memory_bytes, used)
    bar = gauge(own / total, bar_cells, others=(used - own) / total, mark=predicted_bytes / total)
    return _row(f"GPU{device.index}", bar, numbers)


def _device_details(device: DeviceSample, peak_bytes: int | None) -> Content:
    """What lies below a device's bar; the panel of the GPUs has the rest."""
    others = "n/a" if device.process_count is None else str(device.process_count)
    own = format_bytes(device.own_memory_bytes)
    words = f"peak {format_bytes(peak_bytes)}   this run {own}   processes: {others}"
    return Content.styled(" " * _LABEL_CELLS + words, "$muted")


def _over_time(view: RunView, width: int) -> list[Content]:
    """Since the run began: the fullest device or process as a curve, and each of them in a row below it."""
    trail, on_cpu = view.state.memory_trail, view.spec.on_cpu
    if len(trail.points) < 2:
        return []
    names = sorted({n for p in trail.points for n in (p.processes if on_cpu else p.devices)})
    read = trail.of_process if on_cpu else trail.of_device
    columns = {name: read(name) for name in names}
    peaks = {name: max((v for v in column if v is not None), default=0) for name, column in columns.items()}
    if not peaks:
        return []
    fullest = max(peaks, key=lambda name: peaks[name])
    predicted = _predicted(view)
    sample = view.state.hardware
    totals = [d.memory_total_bytes for d in sample.devices if d.memory_total_bytes] if sample else []
    top = float(max(totals, default=0)) if not on_cpu and totals else 1.15 * max(predicted, peaks[fullest])
    took = format_seconds(trail.points[-1].t - trail.points[0].t)
    what = f"rank {fullest}" if on_cpu else f"GPU{fullest}"
    words = f"over {took}, the fullest ({what}); ─ {_mark_words(view)}; top {format_bytes(top)}"
    rows = [Content.styled(words, "$muted"), *area(columns[fullest], width, _TIME_ROWS, top, mark=predicted)]
    for name in names if len(names) > 1 else ():
        label = f"rank{name}" if on_cpu else f"GPU{name}"
        cells = width - _LABEL_CELLS - _NUMBER_CELLS
        drawn = sparkline(stretched(columns[name], cells), cells, floor=0.0)
        peak = fit_right(f"peak {format_bytes(peaks[name])}", _NUMBER_CELLS)
        rows.append(Content.assemble(fit(label, _LABEL_CELLS), (drawn, "$primary"), (peak, "$muted")))
    return rows


def _mark_words(view: RunView) -> str:
    """Of what it is the peak: the head's is that of the tensors alone."""
    return "RSS predicted" if view.spec.on_cpu else "device predicted"


def _predicted(view: RunView) -> int:
    if view.spec.on_cpu:
        return view.prediction.peak_reserved_bytes[0]
    return view.prediction.peak_device_bytes or view.prediction.peak_reserved_bytes[1]


def _compact_rows(view: RunView, width: int, height: int) -> list[Content]:
    """Two to a row, the fullest first when even that is too much."""
    predicted, shares = _shares(view)
    shown = sorted(shares, key=lambda name: shares[name][0], reverse=True)[: 2 * (height - 1)]
    shown = list(shares) if len(shown) == len(shares) else shown
    cells = (width - 2) // 2
    rows = []
    for at in range(0, len(shown), 2):
        pair = []
        for name in shown[at : at + 2]:
            fraction, mark = shares[name]
            bar = gauge(fraction, cells - 5 - 6, mark=mark, style="$primary" if view.spec.on_cpu else None)
            pair.append(Content.assemble(fit(name, 5), bar, fit_right(f"{fraction:.0%}", 6)))
        rows.append(Content("  ").join(pair))
    hidden = len(shares) - len(shown)
    peak = f"┼ {_mark_words(view)} {format_bytes(predicted)}" if predicted else "nothing is predicted"
    words = peak + (f"  and {hidden} more" if hidden else "")
    return [*rows, Content.styled(words, "$muted")]


def _shares(view: RunView) -> tuple[int, dict[str, tuple[float, float]]]:
    """The predicted peak, and by short name how full each device or process is and where the peak lies."""
    sample = view.state.hardware
    if sample is None:
        return 0, {}
    if view.spec.on_cpu:
        predicted = view.prediction.peak_reserved_bytes[0]
        used = {f"r{p.rank}": p.own_rss_bytes for p in sample.processes}
        full = dict.fromkeys(used, max([predicted, *(size or 0 for size in used.values())]) * 1.15)
    else:
        predicted = view.prediction.peak_device_bytes or view.prediction.peak_reserved_bytes[1]
        used = {f"G{d.index}": d.memory_used_bytes for d in sample.devices}
        full = {f"G{d.index}": float(d.memory_total_bytes or 0) for d in sample.devices}
    return predicted, {
        name: (size / full[name], predicted / full[name])
        for name, size in used.items()
        if size is not None and full[name]
    }


def _process_rows(view: RunView, width: int) -> list[Content]:
    state, predicted = view.state, view.prediction.peak_reserved_bytes[0]
    peaks = process_peaks(state, view.spec)
    processes = state.hardware.processes if state.hardware else ()
    held = [max(p.own_rss_bytes or 0, peaks.get(p.rank, 0)) for p in processes]
    scale = max([predicted, *held]) * 1.15
    rows = []
    for process in processes:
        peak, rank = peaks.get(process.rank), state.ranks.get(process.rank)
        keeps = rank is not None and rank.in_use_unknown
        bar_cells = width - _LABEL_CELLS - 1 - _NUMBER_CELLS
        now = process.own_rss_bytes
        if now is None:
            bar, share = gauge(None, bar_cells), ""
        else:
            mark = predicted / scale if predicted else None
            bar = gauge(now / scale, bar_cells, style="$primary", mark=mark)
            # Of a process that keeps what another setting had freed it is no share of this one's prediction.
            share = f" {now / predicted:4.0%}" if predicted and not keeps else ""
        numbers = fit_right(format_bytes(now) + share, _NUMBER_CELLS)
        rows.append(_row(f"rank{process.rank}", bar, numbers))
        if peak is not None and len(processes) <= 2:
            of = " of all settings" if keeps else ""
            text = f"peak {format_bytes(peak)}{of}   PSS {format_bytes(process.own_pss_bytes)}"
            rows.append(Content.styled(" " * _LABEL_CELLS + text, "$muted"))
        if process.compiler_rss_bytes:
            words = f"{format_bytes(process.compiler_rss_bytes)} more in compilers of ops"
            rows.append(Content.styled(" " * _LABEL_CELLS + words, "$muted"))
    if rows and predicted:
        words = f"┼ {_mark_words(view)} {format_bytes(predicted)} a rank = 100%"
        rows.append(Content.styled(words, "$muted"))
    return rows

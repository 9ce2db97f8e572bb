"""Traffic between GPUs (NVLink), to the host (PCIe) and to other machines (network)."""

from __future__ import annotations

from llmtop.profiler import topology
from llmtop.profiler.fold.phaselinks import PhaseTraffic, phase_traffic
from llmtop.profiler.fold.stepprofile import step_profile
from llmtop.profiler.record.deviceevents import DeviceSample, LinkSample
from llmtop.profiler.units import counted, format_rate, format_seconds
from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import (
    NOT_KNOWN,
    Segment,
    fit,
    fit_right,
    harmless,
    lines,
    sparkline,
    stacked,
    wrapped,
)
from llmtop.tui.widgets.palette import PHASES
from llmtop.tui.widgets.picture import Picture

_LABEL_CELLS = 8
_RATE_CELLS = 12
_LINK_CELLS = 26
_PHASE_CELLS = 10
_PROFILE_LABELS = (
    ("nvlink_tx_bytes_per_second", "NVLink →"),
    ("nvlink_rx_bytes_per_second", "NVLink ←"),
    ("pcie_tx_bytes_per_second", "PCIe →"),
    ("pcie_rx_bytes_per_second", "PCIe ←"),
)
"""Sent and received, as the GPU sees it."""
_SHORTEST_SAMPLE_SECONDS = 0.05
"""A sample of eight devices takes some 10 ms."""


class LinksPanel(Picture):
    TITLE = "Links"
    KEY = "6"

    def headline(self, view: RunView) -> str:
        devices = view.state.hardware.devices if view.state.hardware else ()
        return "send, receive" + (f"  {len(devices)} GPUs together" if len(devices) > 1 else "")

    def draw(self, view: RunView, width: int, height: int) -> Content:
        sample = view.state.hardware
        devices = sample.devices if sample else ()
        rows = [
            _sum_row("NVLink", devices, "nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second"),
            _sum_row("PCIe", devices, "pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second"),
            _network_row(view),
        ]
        if self.zoomed:
            rows += [Content(""), *_profile_rows(view, width), *_phase_rows(view), Content("")]
            rows += [*_device_rows(devices), Content(""), *_histories(view, width)]
            rows += [*_pcie_rows(view), *_topology_rows(view), *_link_rows(view, width)]
        return lines(rows if self.zoomed else rows[: max(height, 1)])


def _pair(label: str, send: float | None, receive: float | None) -> Content:
    return Content.assemble(
        (fit(label, _LABEL_CELLS), "$muted"),
        fit_right(format_rate(send), _RATE_CELLS),
        fit_right(format_rate(receive), _RATE_CELLS),
    )


def _total(devices: tuple[DeviceSample, ...], name: str) -> float | None:
    known = [value for value in (getattr(device, name) for device in devices) if value is not None]
    return sum(known) if known else None


def _sum_row(label: str, devices: tuple[DeviceSample, ...], send: str, receive: str) -> Content:
    if not devices:
        return Content.assemble((fit(label, _LABEL_CELLS), "$muted"), f"{NOT_KNOWN}: this run has no GPU")
    sent, received = _total(devices, send), _total(devices, receive)
    if sent is None and received is None:
        why = "the driver tells of none" if label == "NVLink" else "the driver does not tell"
        return Content.assemble((fit(label, _LABEL_CELLS), "$muted"), f"{NOT_KNOWN}: {why}")
    return _pair(label, sent, received)


def _network_row(view: RunView) -> Content:
    host = view.state.hardware.host if view.state.hardware else None
    send = host.network_send_bytes_per_second if host else None
    receive = host.network_receive_bytes_per_second if host else None
    return _pair("network", send, receive)


def _device_rows(devices: tuple[DeviceSample, ...]) -> list[Content]:
    if not devices:
        return []
    names = ("NVLink send", "NVLink recv", "PCIe send", "PCIe recv")
    rows = [Content.styled(fit("", _LABEL_CELLS) + "".join(fit_right(n, 14) for n in names), "$muted")]
    for device in devices:
        rates = (
            device.nvlink_tx_bytes_per_second,
            device.nvlink_rx_bytes_per_second,
            device.pcie_tx_bytes_per_second,
            device.pcie_rx_bytes_per_second,
        )
        cells = "".join(fit_right(format_rate(rate), 14) for rate in rates)
        rows.append(Content(fit(f"GPU{device.index}", _LABEL_CELLS) + cells))
    return rows


def _phase_rows(view: RunView) -> list[Content]:
    """What the links carried while each phase of a step was under way, of all devices together."""
    sample = view.state.hardware
    if sample is None or not sample.devices:
        return []
    found = phase_traffic(view.state.hardware_history, view.state.recent_steps)
    if not found.tells:
        return [Content.styled(row, "$muted") for row in _too_slow(view, found)]
    names = ("NVLink send", "NVLink recv", "PCIe send", "PCIe recv")
    head = (
        fit("phase", _PHASE_CELLS) + "".join(fit_right(name, 13) for name in names) + fit_right("samples", 9)
    )
    rows = [Content.styled(head, "$muted")]
    for row in found.rows:
        cells = "".join(fit_right(format_rate(rate), 13) for rate in row.rates)
        count = (fit_right(str(row.samples), 9), "$muted")
        rows.append(Content.assemble(fit(row.phase, _PHASE_CELLS), cells, count))
    return rows


def _profile_rows(view: RunView, width: int) -> list[Content]:
    """One step from left to right, and below it what the links carried then, over many steps."""
    columns = width - _PHASE_CELLS - _RATE_CELLS
    found = step_profile(view.state.hardware_history, view.state.recent_steps, columns)
    if found is None:
        return []
    bar = [
        Segment(PHASES[s.phase].letter, PHASES[s.phase].colour, s.ended - s.began) for s in found.stretches
    ]
    head = f"a step of {format_seconds(found.step_seconds)}: the mean of {counted(found.steps, 'step')} by"
    head += f" {counted(found.samples, 'sample')}; each row up to its highest rate"
    rows = [Content.styled(row, "$muted") for row in wrapped(head, width)]
    rows.append(Content(" " * _PHASE_CELLS) + stacked(bar, found.step_seconds, columns))
    for name, label in _PROFILE_LABELS:
        rates = found.rates[name]
        known = [rate for rate in rates if rate is not None]
        if known:
            drawn = (fit(sparkline(rates, columns, floor=0.0), columns), "$primary")
            top = fit_right(format_rate(max(known)), _RATE_CELLS)
            rows.append(Content.assemble((fit(label, _PHASE_CELLS), "$muted"), drawn, top))
    return [*rows, Content("")]


def _too_slow(view: RunView, found: PhaseTraffic) -> list[str]:
    """Why it cannot be told, and what would tell it."""
    every, longest = found.sample_seconds, found.longest_seconds
    if every is None or longest is None:
        return [f"by phase of the step: {NOT_KNOWN}, no step or no samples yet"]
    words = f"by phase of the step: {NOT_KNOWN}. A sample comes every {format_seconds(every)},"
    words += f" and the longest phase takes {format_seconds(longest)}."
    wanted = max(_SHORTEST_SAMPLE_SECONDS, round(longest / 4, 2))
    if wanted >= every:
        return [words]
    return [words, f"To see it: llmtop set {harmless(view.state.called)} sample_seconds={wanted:g}"]


def _histories(view: RunView, width: int) -> list[Content]:
    """How the sums went over the samples that are kept."""
    rows = []
    for label, names in (
        ("NVLink", ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")),
        ("PCIe", ("pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second")),
    ):
        sums: list[float | None] = []
        for sample in view.state.hardware_history:
            known = [total for total in (_total(sample.devices, name) for name in names) if total is not None]
            sums.append(sum(known) if known else None)
        drawn = sparkline(sums, width - _LABEL_CELLS, floor=0.0)
        if drawn:
            rows.append(Content.assemble((fit(label, _LABEL_CELLS), "$muted"), (drawn, "$primary")))
    return rows


def _pcie_rows(view: RunView) -> list[Content]:
    """Generation and width now and at most; a device that idles goes down to an older generation."""
    sample, described = view.state.hardware, view.state.topology
    most = {device.index: device for device in described.devices} if described else {}
    rows = []
    for device in sample.devices if sample else ():
        if device.pcie_generation is None and device.pcie_width is None:
            continue
        words = topology.pcie_words(device.pcie_generation, device.pcie_width)
        best = most.get(device.index)
        if best is not None:
            words += f" of {topology.pcie_words(best.pcie_generation_max, best.pcie_width_max)}"
        if device.pcie_replays:
            words += f", {counted(device.pcie_replays, 'replay')}"
        rows.append(Content(fit(f"GPU{device.index}", _LABEL_CELLS) + f"PCIe {words}"))
    return [Content(""), *rows] if rows else []


def _newest_links(view: RunView) -> dict[int, tuple[LinkSample, ...]]:
    """Of each device; single links are read less often than the rest."""
    found: dict[int, tuple[LinkSample, ...]] = {}
    for sample in reversed(view.state.hardware_history):
        for device in sample.devices:
            if device.links:
                found.setdefault(device.index, device.links)
        if len(found) == len(sample.devices):
            break
    return dict(sorted(found.items()))


def _link_rows(view: RunView, width: int) -> list[Content]:
    """Every NVLink: send and receive, several to a row, and its errors where there are any."""
    rows: list[Content] = []
    across = max(1, width // _LINK_CELLS)
    for index, links in _newest_links(view).items():
        words = f"GPU{index}  {counted(len(links), 'NVLink')} up: send and receive of each"
        rows += [Content(""), Content.styled(words, "$muted")]
        for at in range(0, len(links), across):
            rows.append(Content("".join(_link_cell(link) for link in links[at : at + across])))
        rows += [Content.styled(_link_errors(link), "$warning") for link in links if _has_errors(link)]
    return rows


def _link_cell(link: LinkSample) -> str:
    rates = fit_right(format_rate(link.tx_bytes_per_second), 11)
    rates += fit_right(format_rate(link.rx_bytes_per_second), 11)
    return fit(f"{link.link:2d}{rates}", _LINK_CELLS)


def _has_errors(link: LinkSample) -> bool:
    return any((link.crc_errors, link.replays, link.recoveries))


def _link_errors(link: LinkSample) -> str:
    parts = (
        counted(link.crc_errors or 0, "CRC error"),
        counted(link.replays or 0, "replay"),
        counted(link.recoveries or 0, "recovery", "recoveries"),
    )
    return f"link {link.link}: {', '.join(parts)} since the driver was loaded"


def _topology_rows(view: RunView) -> list[Content]:
    described = view.state.topology
    if described is None or not described.devices:
        return []
    table = topology.matrix(described)
    widths = [max(len(row[column]) for row in table) + 2 for column in range(len(table[0]))]
    rows = [
        "".join(fit(cell, cells) for cell, cells in zip(row, widths, strict=True)).rstrip() for row in table
    ]
    meanings = [f"{road} {words}" for road, words in topology.legend(described)]
    notes = [f"GPU{device.index}  {topology.nvlink_words(device)}" for device in described.devices]
    notes += [problem.what for problem in topology.problems(described)]
    told = [Content.styled(harmless(note), "$muted") for note in ("; ".join(meanings), *notes) if note]
    return [Content(""), Content.styled(rows[0], "$muted"), *map(Content, map(harmless, rows[1:])), *told]

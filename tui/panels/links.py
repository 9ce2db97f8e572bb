"""Traffic between GPUs (NVLink), to the host (PCIe) and to other machines (network)."""

from __future__ import annotations

from textual.content import Content

from llmtop.profiler.events import DeviceSample
from llmtop.profiler.units import format_rate
from llmtop.tui.view import RunView
from llmtop.tui.widgets.paint import NOT_KNOWN, fit, fit_right, lines, sparkline
from llmtop.tui.widgets.panel import Panel

_LABEL_CELLS = 8
_RATE_CELLS = 12


class LinksPanel(Panel):
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
            rows += [Content(""), *_device_rows(devices), Content(""), *_histories(view, width)]
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
        why = "there is none" if label == "NVLink" else "the driver does not tell"
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

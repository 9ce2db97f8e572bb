"""NVLink and PCIe of one device: running totals, rates by their differences, each link, its errors.

PCIe totals come from the byte-count fields, because `nvmlDeviceGetPcieThroughput` takes 20 ms a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from llmtop.profiler.hardware.counters import RateCounter
from llmtop.profiler.hardware.nvmlcalls import NvmlCalls
from llmtop.profiler.record.deviceevents import LinkSample

ALL_LINKS = 0xFFFFFFFF
"""Scope of a field value: the sum over all NVLinks; without it only link 0 is counted."""
MAX_LINKS = 36
_KIB = 1024
_NVLINK_TX, _NVLINK_RX = 138, 139
"""NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX: payload without protocol, in KiB."""
_PCIE_TX, _PCIE_RX = 197, 198
"""NVML_FI_DEV_PCIE_COUNT_TX_BYTES and _RX_BYTES."""
_LINK_ERRORS: tuple[tuple[int, int], ...] = ((163, 2), (161, 0), (162, 1))
"""CRC, replay, recovery: the field whose scope is the link, and the counter of older drivers and devices."""


class LinkTotals(Struct, frozen=True, kw_only=True):
    """Bytes since the driver was loaded; None: the driver does not tell."""

    nvlink_tx_bytes: int | None = None
    nvlink_rx_bytes: int | None = None
    pcie_tx_bytes: int | None = None
    pcie_rx_bytes: int | None = None


class LinkReader:
    """One device's links. What it does not have is asked for once."""

    def __init__(self, calls: NvmlCalls, handle: Any, clock: Callable[[], float]) -> None:
        self._calls, self._handle, self._clock = calls, handle, clock
        self._rates: dict[tuple[int, int], RateCounter] = {}
        self._unsupported: set[tuple[int, int]] = set()
        """(Field, scope): a driver may tell the sum of all links and not single ones."""
        self._numbers: tuple[int, ...] | None = None
        """Links that the device has, up or down; None before they were looked for."""

    def totals(self) -> LinkTotals:
        nvlink = self._values([(_NVLINK_TX, ALL_LINKS), (_NVLINK_RX, ALL_LINKS)])
        pcie = self._values([(_PCIE_TX, 0), (_PCIE_RX, 0)])
        return LinkTotals(
            nvlink_tx_bytes=_bytes(nvlink.get((_NVLINK_TX, ALL_LINKS)), _KIB),
            nvlink_rx_bytes=_bytes(nvlink.get((_NVLINK_RX, ALL_LINKS)), _KIB),
            pcie_tx_bytes=_bytes(pcie.get((_PCIE_TX, 0)), 1),
            pcie_rx_bytes=_bytes(pcie.get((_PCIE_RX, 0)), 1),
        )

    def nvlink_rates(self) -> dict[str, float | None]:
        """Of all links together, as fields of a device sample."""
        return self._pair("nvlink", (_NVLINK_TX, ALL_LINKS), (_NVLINK_RX, ALL_LINKS), _KIB)

    def pcie_rates(self) -> dict[str, float | None]:
        return self._pair("pcie", (_PCIE_TX, 0), (_PCIE_RX, 0), 1)

    def active(self) -> tuple[int, ...] | None:
        """Numbers of the links that are up; None for a device that tells of none."""
        all_numbers = range(self._calls.constant("NVML_NVLINK_MAX_LINKS", MAX_LINKS))
        states = {
            link: self._calls.number("nvmlDeviceGetNvLinkState", self._handle, link)
            for link in (all_numbers if self._numbers is None else self._numbers)
        }
        if self._numbers is None and not self._calls.met_lost_device:
            self._numbers = tuple(link for link, state in states.items() if state is not None)
        known = [link for link, state in states.items() if state is not None]
        return tuple(link for link in known if states[link]) if known else None

    def each(self) -> dict[str, Any]:
        """Every link that is up, as fields of a device sample."""
        active = self.active()
        if not active:
            return {"nvlinks_active": None if active is None else 0}
        rates = [(field, link) for link in active for field in (_NVLINK_TX, _NVLINK_RX)]
        totals = self._values(rates)
        errors = self._values([(field, link) for link in active for field, _ in _LINK_ERRORS])
        now = self._clock()
        samples = []
        for link in active:
            tx, rx = (
                self._rate((field, link), totals.get((field, link)), now, _KIB)
                for field in (_NVLINK_TX, _NVLINK_RX)
            )
            crc, replays, recoveries = (
                self._errors(link, errors.get((field, link)), counter) for field, counter in _LINK_ERRORS
            )
            samples.append(LinkSample(link, _bytes(tx, 1), _bytes(rx, 1), crc, replays, recoveries))
        return {"nvlinks_active": len(active), "links": tuple(samples)}

    def _pair(
        self, name: str, sent: tuple[int, int], received: tuple[int, int], scale: int
    ) -> dict[str, float | None]:
        totals = self._values([sent, received])
        now = self._clock()
        return {
            f"{name}_tx_bytes_per_second": self._rate(sent, totals.get(sent), now, scale),
            f"{name}_rx_bytes_per_second": self._rate(received, totals.get(received), now, scale),
        }

    def _rate(self, counter: tuple[int, int], total: float | None, now: float, scale: int) -> float | None:
        rate = self._rates.setdefault(counter, RateCounter())
        return rate.advance(None if total is None else total * scale, now)

    def _errors(self, link: int, value: float | None, counter: int) -> int | None:
        if value is not None:
            return int(value)
        return self._calls.number("nvmlDeviceGetNvLinkErrorCounter", self._handle, link, counter)

    def _values(self, requests: list[tuple[int, int]]) -> dict[tuple[int, int], float | None]:
        """Values by (field, scope)."""
        wanted = [request for request in requests if request not in self._unsupported]
        answers = self._calls.fields(self._handle, wanted)
        if not answers:
            return {}
        for request, answer in zip(wanted, answers, strict=True):
            if not answer.is_supported:
                self._unsupported.add(request)
        return {request: answer.value for request, answer in zip(wanted, answers, strict=True)}


def _bytes(value: float | None, scale: int) -> int | None:
    return None if value is None else round(value * scale)

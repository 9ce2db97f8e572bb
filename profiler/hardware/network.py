"""How the machine's links to others are: which are down, how often they were lost, and what went wrong on them.

Read from /sys: `class/net` for every interface but the loopback, `class/infiniband` for its ports. What the
kernel does not tell is None.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

MOST_LINKS = 32
"""A machine with many containers has hundreds of virtual interfaces; those with a device come first."""
_NET_ERRORS = ("rx_errors", "tx_errors")
_PORT_ERRORS = (
    "symbol_error",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)


class NetworkState(Struct, frozen=True, kw_only=True):
    links_down: tuple[str, ...] = ()
    """Links that were up when they were first looked at, by name, and are not now or are gone."""
    link_losses: int | None = None
    """How often links went down, all together, since the machine was started."""
    errors: int | None = None
    """Of all links since the machine was started: what came or went damaged, without what was dropped."""


class NetworkReader:
    """Which links were up at first is remembered: one that nobody uses is no finding."""

    def __init__(self, root: Path = Path("/sys/class")) -> None:
        self._root = root
        self._once_up: set[str] = set()

    def read(self) -> NetworkState:
        up: dict[str, bool] = {}
        losses: list[int | None] = []
        errors: list[int | None] = []
        for link in self._interfaces():
            up[link.name] = _word(link / "operstate") in ("up", "unknown")
            losses.append(_number(link / "carrier_down_count"))
            errors += [_number(link / "statistics" / name) for name in _NET_ERRORS]
        for port in self._ports():
            up[f"{port.parent.parent.name}/{port.name}"] = "ACTIVE" in (_word(port / "state") or "")
            losses.append(_number(port / "counters" / "link_downed"))
            errors += [_number(port / "counters" / name) for name in _PORT_ERRORS]
        self._once_up |= {name for name, is_up in up.items() if is_up}
        return NetworkState(
            links_down=tuple(sorted(name for name in self._once_up if not up.get(name, False))),
            link_losses=_sum(losses),
            errors=_sum(errors),
        )

    def _interfaces(self) -> Iterator[Path]:
        found = [link for link in _folders(self._root / "net") if link.name != "lo"]
        found.sort(key=lambda link: (not (link / "device").exists(), link.name))
        yield from found[:MOST_LINKS]

    def _ports(self) -> Iterator[Path]:
        for device in _folders(self._root / "infiniband")[:MOST_LINKS]:
            yield from _folders(device / "ports")


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _word(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path) -> int | None:
    word = _word(path)
    return int(word) if word is not None and word.isdecimal() else None


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None

"""How the machine's links to others are: which are down, how often they were lost, what went wrong on them.

Interfaces and their errors are those of the process's own network namespace; how often a link went down, and
ports of InfiniBand, are read from /sys. What the kernel does not tell is None.
"""

from __future__ import annotations

import fcntl
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from socket import socket

MOST_LINKS = 32
"""A machine with many containers has hundreds of virtual interfaces; those with a device come first."""
_PORT_ERRORS = (
    "symbol_error",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_SIOCGIFFLAGS, _IFF_RUNNING = 0x8913, 0x40
_RECEIVE_ERRORS, _SEND_ERRORS = 2, 10
"""Columns of /proc/net/dev behind the name."""


class NetworkState(Struct, frozen=True, kw_only=True):
    links_down: tuple[str, ...] = ()
    """Links that were up when they were first looked at, by name, and are not now or are gone."""
    link_losses: int | None = None
    """How often links went down, all together, since the machine was started."""
    errors: int | None = None
    """Of all links since the machine was started: what came or went damaged, without what was dropped."""


class Interface(NamedTuple):
    number: int
    """The kernel's index of it."""
    running: bool
    """Whether it is up and something is at its other end."""


def interfaces_here() -> Mapping[str, Interface]:
    """Of the process's network namespace, by name."""
    import socket  # whoever asks only how much memory there is has no use for it

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        return {name: Interface(index, _is_running(asked, name)) for index, name in socket.if_nameindex()}


def _is_running(asked: socket, name: str) -> bool:
    try:
        answer = fcntl.ioctl(asked, _SIOCGIFFLAGS, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return False  # it has just gone
    flags: int = struct.unpack_from("H", answer, 16)[0]
    return bool(flags & _IFF_RUNNING)


class NetworkReader:
    """Which links were up at first is remembered: one that nobody uses is no finding."""

    def __init__(
        self,
        root: Path = Path("/sys/class"),
        counters: Path = Path("/proc/self/net/dev"),
        interfaces: Callable[[], Mapping[str, Interface]] = interfaces_here,
    ) -> None:
        self._root, self._counters, self._interfaces = root, counters, interfaces
        self._once_up: set[str] = set()

    def read(self) -> NetworkState:
        up: dict[str, bool] = {}
        losses: list[int | None] = []
        errors: list[int | None] = []
        counted = self._errors()
        for name, interface in self._chosen():
            up[name] = interface.running
            losses.append(self._losses(name, interface))
            errors.append(counted.get(name))
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

    def _chosen(self) -> list[tuple[str, Interface]]:
        try:
            found = [(name, one) for name, one in self._interfaces().items() if name != "lo"]
        except OSError:
            return []
        if len(found) > MOST_LINKS:
            found.sort(key=lambda one: not (self._root / "net" / one[0] / "device").exists())
        return found[:MOST_LINKS]

    def _losses(self, name: str, interface: Interface) -> int | None:
        """/sys may be that of another network namespace, where the name is another interface's."""
        folder = self._root / "net" / name
        return (
            _number(folder / "carrier_down_count")
            if _number(folder / "ifindex") == interface.number
            else None
        )

    def _errors(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for line in (_word(self._counters) or "").splitlines():
            name, colon, rest = line.partition(":")
            numbers = rest.split()
            if colon and len(numbers) > _SEND_ERRORS:
                found[name.strip()] = int(numbers[_RECEIVE_ERRORS]) + int(numbers[_SEND_ERRORS])
        return found

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

"""Where the ranks of several hosts meet: an address of the first host, and the way out to it of each."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping

import psutil

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def own_address(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """An address of this machine that others reach it by; empty where none can be told.

    The hostfile's, if it is one; the one that the lead's SSH connection came in at; what the machine's name
    or that of the hostfile means; else the first one that is not the loopback's.
    """
    candidates = [name, *environment.get("SSH_CONNECTION", "").split()[2:3]]
    candidates += [found for host in (name, socket.gethostname()) for found in _resolved(host)]
    mine = _own_addresses()
    usable = [one for one in candidates if one in mine and not ipaddress.ip_address(one).is_loopback]
    others = [one for one in mine if not ipaddress.ip_address(one).is_loopback]
    return next(iter([*usable, *others]), "")


def interface_towards(address: str) -> str:
    """The network interface by which this machine reaches an address; empty where it is not known."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: the kernel only picks the way.
            probe.connect(target)
            source = probe.getsockname()[0]
    except OSError:
        return ""
    return _own_addresses().get(source, "")


def meeting_variables(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What makes gloo take that interface: by itself it takes the one that the machine's name leads to.

    NCCL looks for one by itself, and finds InfiniBand too.
    """
    interface = "" if environment.get(_GLOO_INTERFACE) else interface_towards(address)
    return {_GLOO_INTERFACE: interface} if interface else {}


def _resolved(host: str) -> list[str]:
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _own_addresses() -> dict[str, str]:
    """Address to interface, of those that are not only for the link."""
    found: dict[str, str] = {}
    for interface, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6) and "%" not in one.address:
                found.setdefault(one.address, interface)
    return found

"""Links to other machines: made-up ones, and those that there are."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llmtop.profiler.hardware.network import Interface, NetworkReader

_HEADS = "Inter-|   Receive  |  Transmit\n face |bytes packets errs drop fifo frame compressed|bytes ...\n"


class Machine:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.links: dict[str, Interface] = {}
        self.errors: dict[str, int] = {}
        self.reader = NetworkReader(root / "sys", root / "dev", lambda: self.links)

    def link(self, name: str, *, up: bool = True, losses: int = 0, errors: int = 0, index: int = 2) -> None:
        self.links[name] = Interface(index, up)
        self.errors[name] = errors
        folder = self.root / "sys" / "net" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ifindex").write_text("2\n")
        (folder / "carrier_down_count").write_text(f"{losses}\n")
        lines = (f"  {one}: 10 1 {count} 3 0 0 0 0 20 2 0 4 0 0 0 0\n" for one, count in self.errors.items())
        (self.root / "dev").write_text(_HEADS + "".join(lines))

    def port(self, *, up: bool = True, symbol_errors: int = 0) -> None:
        folder = self.root / "sys" / "infiniband" / "mlx5_0" / "ports" / "1"
        (folder / "counters").mkdir(parents=True, exist_ok=True)
        (folder / "state").write_text("4: ACTIVE\n" if up else "1: DOWN\n")
        (folder / "counters" / "symbol_error").write_text(f"{symbol_errors}\n")


def test_a_link_that_goes_down_is_named_and_one_that_never_was_up_is_not(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.link("eth0")
    machine.link("eth1", up=False)
    machine.link("lo")
    assert machine.reader.read().links_down == ()
    machine.link("eth0", up=False, losses=1)
    found = machine.reader.read()
    assert (found.links_down, found.link_losses) == (("eth0",), 1)
    machine.link("eth0", losses=1)
    assert machine.reader.read().links_down == ()
    del machine.links["eth0"]
    assert machine.reader.read().links_down == ("eth0",), "one that is gone is down too"


def test_ports_of_infiniband_count_as_links(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.link("eth0", errors=2)
    machine.port()
    assert machine.reader.read().errors == 2
    machine.port(up=False, symbol_errors=5)
    found = machine.reader.read()
    assert (found.links_down, found.errors) == (("mlx5_0/1",), 7)


def test_losses_of_another_namespaces_link_of_the_same_name_are_not_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.link("eth0", losses=3, index=9)
    assert machine.reader.read().link_losses is None


def test_what_the_kernel_does_not_tell_is_not_known(tmp_path: Path) -> None:
    found = Machine(tmp_path).reader.read()
    assert (found.links_down, found.link_losses, found.errors) == ((), None, None)


def test_the_links_of_this_machine_are_found() -> None:
    from llmtop.profiler.hardware.network import interfaces_here

    found = interfaces_here()
    assert found.keys() == {name for _, name in socket.if_nameindex()}
    assert NetworkReader().read().links_down == ()


_PULLED = """
import subprocess
from llmtop.profiler.hardware.network import NetworkReader
def ip(words):
    subprocess.run(["ip", *words.split()], check=True)
ip("link add near type veth peer name far")
ip("link set near up")
ip("link set far up")
reader = NetworkReader()
for word, down in (("up", ()), ("down", ("far", "near")), ("up", ())):
    ip("link set far " + word)
    while reader.read().links_down != down:  # the kernel tells it a moment later
        pass
    print(word, *down)
"""


def test_a_cable_that_is_pulled_is_seen_in_a_network_namespace(tmp_path: Path) -> None:
    """Where /sys is that of another one."""
    if shutil.which("ip") is None or subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        pytest.skip("no network namespace can be made here")
    told = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", _PULLED],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert told.stdout.splitlines() == ["up", "down far near", "up"]

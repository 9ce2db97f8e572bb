"""Links to other machines, from a made-up /sys."""

from __future__ import annotations

from pathlib import Path

from llmtop.profiler.hardware.network import NetworkReader


def link(root: Path, name: str, *, up: bool = True, losses: int = 0, errors: int = 0) -> None:
    folder = root / "net" / name / "statistics"
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "operstate").write_text("up\n" if up else "lowerlayerdown\n")
    (folder.parent / "carrier_down_count").write_text(f"{losses}\n")
    (folder / "rx_errors").write_text(f"{errors}\n")
    (folder / "tx_errors").write_text("0\n")


def port(root: Path, *, up: bool = True, symbol_errors: int = 0) -> None:
    folder = root / "infiniband" / "mlx5_0" / "ports" / "1"
    (folder / "counters").mkdir(parents=True, exist_ok=True)
    (folder / "state").write_text("4: ACTIVE\n" if up else "1: DOWN\n")
    (folder / "counters" / "symbol_error").write_text(f"{symbol_errors}\n")


def test_a_link_that_goes_down_is_named_and_one_that_never_was_up_is_not(tmp_path: Path) -> None:
    link(tmp_path, "eth0")
    link(tmp_path, "eth1", up=False)
    link(tmp_path, "lo")
    reader = NetworkReader(tmp_path)
    assert reader.read().links_down == ()
    link(tmp_path, "eth0", up=False, losses=1)
    found = reader.read()
    assert (found.links_down, found.link_losses) == (("eth0",), 1)
    link(tmp_path, "eth0", losses=1)
    assert reader.read().links_down == ()


def test_ports_of_infiniband_count_as_links(tmp_path: Path) -> None:
    link(tmp_path, "eth0", errors=2)
    port(tmp_path)
    reader = NetworkReader(tmp_path)
    assert reader.read().errors == 2
    port(tmp_path, up=False, symbol_errors=5)
    found = reader.read()
    assert (found.links_down, found.errors) == (("mlx5_0/1",), 7)


def test_what_the_kernel_does_not_tell_is_not_known(tmp_path: Path) -> None:
    found = NetworkReader(tmp_path).read()
    assert (found.links_down, found.link_losses, found.errors) == ((), None, None)

"""Host readings: cgroup limits of both versions, rates, and the memory of process trees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtop.profiler.hardware.cgroup import CgroupMemory, cgroup_memory
from llmtop.profiler.hardware.host import HostReader
from llmtop.profiler.hardware.hostmemory import host_memory_bytes
from llmtop.profiler.hardware.machine import torch_with_cuda
from llmtop.profiler.hardware.processes import TreeMemory, descendants, process_tree_memory
from tests.recorded import ManualClock

MIB = 1024**2


class FakeCgroups:
    """A process's view of the cgroup trees below a folder."""

    def __init__(self, root: Path, memberships: str, mounts: str) -> None:
        self.proc, self.tree = root / "proc", root / "cgroup"
        process = self.proc / "self"
        process.mkdir(parents=True)
        (process / "cgroup").write_text(memberships)
        (process / "mountinfo").write_text(mounts.replace("MOUNT", str(self.tree)))
        self.tree.mkdir()

    def group(self, path: str, **files: str) -> None:
        folder = self.tree / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(content)

    def read(self) -> CgroupMemory:
        return cgroup_memory(proc=self.proc)


V2_MOUNT = "30 23 0:26 / MOUNT rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 ROOT MOUNT rw - cgroup cgroup rw,memory\n"
)


def test_v2_takes_the_tightest_limit_on_the_way_up(tmp_path: Path) -> None:
    groups = FakeCgroups(tmp_path, "0::/slice/job/step\n", V2_MOUNT)
    groups.group("slice", memory__max=str(800 * MIB), memory__current=str(700 * MIB))
    groups.group(
        "slice/job",
        memory__max=str(500 * MIB),
        memory__current=str(400 * MIB),
        memory__stat=f"anon 1\ninactive_file {150 * MIB}\nactive_file 7\n",
    )
    groups.group("slice/job/step", memory__max="max", memory__current=str(90 * MIB))
    assert groups.read() == CgroupMemory(limit_bytes=500 * MIB, used_bytes=250 * MIB)


def test_v2_without_limits_shows_the_own_use(tmp_path: Path) -> None:
    groups = FakeCgroups(tmp_path, "0::/a/b\n", V2_MOUNT)
    groups.group("a/b", memory__max="max", memory__current=str(90 * MIB))
    assert groups.read() == CgroupMemory(limit_bytes=None, used_bytes=90 * MIB)


def test_v1_reads_the_memory_hierarchy(tmp_path: Path) -> None:
    groups = FakeCgroups(
        tmp_path, "8:pids:/x\n4:memory:/job\n1:cpu:/\n0::/unified\n", V1_MOUNTS.replace("ROOT", "/")
    )
    groups.group("", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="5")
    groups.group(
        "job",
        memory__limit_in_bytes=str(300 * MIB),
        memory__usage_in_bytes=str(200 * MIB),
        memory__stat=f"inactive_file 1\ntotal_inactive_file {40 * MIB}\n",
    )
    assert groups.read() == CgroupMemory(limit_bytes=300 * MIB, used_bytes=160 * MIB)


@pytest.mark.parametrize("root", ["/docker/abc", "/"])
def test_in_a_container_the_mount_is_the_containers_own_group(tmp_path: Path, root: str) -> None:
    """The membership names the host's path, which the container's mount does not have."""
    groups = FakeCgroups(tmp_path, "4:memory:/docker/abc\n", V1_MOUNTS.replace("ROOT", root))
    groups.group("", memory__limit_in_bytes=str(64 * MIB), memory__usage_in_bytes=str(MIB))
    assert groups.read() == CgroupMemory(limit_bytes=64 * MIB, used_bytes=MIB)


def test_no_cgroups_and_strange_paths_are_unknown(tmp_path: Path) -> None:
    assert cgroup_memory(proc=tmp_path / "nothing") == CgroupMemory()
    groups = FakeCgroups(tmp_path, "0::/../../outside\n", V2_MOUNT)
    assert groups.read() == CgroupMemory()


def test_this_process() -> None:
    memory = cgroup_memory()
    assert memory.limit_bytes is None or memory.limit_bytes > 0
    total = host_memory_bytes()
    assert total is not None and total > 64 * MIB


class FakePsutil:
    """Counters that a test moves; a name in `broken` raises as psutil does in odd containers."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        self.times = SimpleTimes(user=100.0, idle=300.0, iowait=0.0)
        self.disk: Any = SimpleNamespace(read_bytes=1000, write_bytes=2000)
        self.disks: dict[str, Any] = {
            "sda": SimpleNamespace(read_bytes=10**9, write_bytes=0),
            "nvme0n1": SimpleNamespace(read_bytes=1000, write_bytes=0),
            "nvme0n1p1": SimpleNamespace(read_bytes=10**6, write_bytes=10**6),
            "nvme0c0n1": SimpleNamespace(read_bytes=10**6, write_bytes=10**6),
        }
        self.cards = {
            "lo": SimpleNamespace(bytes_recv=10**9, bytes_sent=10**9),
            "eth0": SimpleNamespace(bytes_recv=100, bytes_sent=200),
            "ib0": SimpleNamespace(bytes_recv=0, bytes_sent=0),
        }
        self.broken: dict[str, Exception] = {}

    def _answer(self, name: str, value: Any) -> Any:
        if name in self.broken:
            raise self.broken[name]
        return value

    def virtual_memory(self) -> Any:
        return self._answer("virtual_memory", SimpleNamespace(total=1000, available=400))

    def swap_memory(self) -> Any:
        return self._answer("swap_memory", SimpleNamespace(used=7))

    def cpu_count(self) -> Any:
        return self._answer("cpu_count", 8)

    def cpu_times(self) -> Any:
        return self._answer("cpu_times", self.times)

    def disk_io_counters(self, nowrap: bool, perdisk: bool = False) -> Any:
        return self._answer("disk_io_counters", self.disks if perdisk else self.disk)

    def net_io_counters(self, pernic: bool, nowrap: bool) -> Any:
        return self._answer("net_io_counters", self.cards)


class SimpleTimes:
    def __init__(self, **seconds: float) -> None:
        self.__dict__.update(seconds)

    def __iter__(self) -> Iterator[float]:
        return iter(self.__dict__.values())


def test_host_rates_are_differences_without_the_loopback() -> None:
    psutil, time = FakePsutil(), ManualClock()
    host = HostReader(psutil, clock=lambda: time.now)
    first = host.read()
    assert (first.memory_total_bytes, first.memory_available_bytes, first.swap_used_bytes) == (1000, 400, 7)
    assert first.cpu_count == 8 and first.cpu_percent is None and first.disk_read_bytes_per_second is None
    time.advance(2.0)
    psutil.times = SimpleTimes(user=103.0, idle=300.5, iowait=0.5)
    psutil.disk = SimpleNamespace(read_bytes=5000, write_bytes=2000)
    psutil.disks["nvme0n1"] = SimpleNamespace(read_bytes=4000, write_bytes=600)
    psutil.cards["eth0"] = SimpleNamespace(bytes_recv=300, bytes_sent=200)
    psutil.cards["lo"] = SimpleNamespace(bytes_recv=2 * 10**9, bytes_sent=2 * 10**9)
    second = host.read()
    assert second.cpu_percent == pytest.approx(75.0)
    assert (second.disk_read_bytes_per_second, second.disk_write_bytes_per_second) == (2000.0, 0.0)
    assert (second.nvme_read_bytes_per_second, second.nvme_write_bytes_per_second) == (1500.0, 300.0)
    assert second.network_receive_bytes_per_second == 100.0
    assert second.network_send_bytes_per_second == 0.0


@pytest.mark.parametrize(
    "error", [FileNotFoundError("/proc/diskstats"), NotImplementedError(), RuntimeError(), FakePsutil.Error()]
)
def test_what_psutil_cannot_read_is_unknown(error: Exception) -> None:
    psutil = FakePsutil()
    names = ("virtual_memory", "swap_memory", "cpu_times", "cpu_count", "disk_io_counters", "net_io_counters")
    psutil.broken = dict.fromkeys(names, error)
    sample = HostReader(psutil).read()
    assert sample.memory_total_bytes is None and sample.swap_used_bytes is None
    assert (
        sample.cpu_percent is None
        and sample.cpu_count is None
        and sample.network_send_bytes_per_second is None
    )
    psutil.broken = {}
    psutil.disk, psutil.disks, psutil.cards = None, {}, {}
    assert HostReader(psutil).read().nvme_read_bytes_per_second is None
    assert HostReader(psutil).read().disk_read_bytes_per_second is None


def test_the_real_host() -> None:
    sample = HostReader().read()
    assert sample.memory_total_bytes is not None and sample.memory_available_bytes is not None
    assert 0 < sample.memory_available_bytes <= sample.memory_total_bytes


_CHILD = "held = bytearray(30 << 20); print('up', flush=True); input()"
_PARENT = f"""
import subprocess, sys
held = bytearray(40 << 20)
command = [sys.executable, "-c", {_CHILD!r}]
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
input()
child.communicate(b"\\n")
"""


def test_a_process_tree_counts_its_children_and_ends_as_none() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        memory = process_tree_memory(parent.pid)
        assert memory is not None
        assert set(memory.pids) == {parent.pid, child}
        assert memory.rss_bytes > 70 * MIB
        assert memory.pss_bytes is None or memory.pss_bytes <= memory.rss_bytes
        alone = process_tree_memory(child, with_pss=False)
        assert alone is not None and alone.rss_bytes < memory.rss_bytes
        assert alone.pss_bytes is None
        parent.communicate("\n", timeout=60)
    finally:
        parent.kill()
        parent.wait()
    assert process_tree_memory(parent.pid) is None


def fake_process(
    proc: Path,
    pid: int,
    parent: int,
    *,
    name: str = "odd) name (x)",
    state: str = "S",
    pss_kib: int | None = 3,
) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    rest = " ".join(["0"] * 9 + ["250", "50"] + ["0"] * 9)
    (folder / "stat").write_text(f"{pid} ({name}) {state} {parent} {rest}\n")
    (folder / "statm").write_text("100 10 5 1 0 9 0\n")
    if pss_kib is not None:
        (folder / "smaps_rollup").write_text(f"0-1 ---p [rollup]\nRss: 9 kB\nPss:   {pss_kib} kB\n")


def test_trees_zombies_and_unreadable_shares(tmp_path: Path) -> None:
    fake_process(tmp_path, 10, 1)
    fake_process(tmp_path, 11, 10)
    fake_process(tmp_path, 12, 11)
    fake_process(tmp_path, 13, 10, state="Z")
    fake_process(tmp_path, 20, 1, pss_kib=None)
    (tmp_path / "meminfo").touch()
    page = os.sysconf("SC_PAGE_SIZE")
    ticks = os.sysconf("SC_CLK_TCK")
    assert descendants([10, 20, 99], proc=tmp_path) == {10: (10, 11, 12), 20: (20,), 99: (99,)}
    assert process_tree_memory(10, proc=tmp_path) == TreeMemory(
        pids=(10, 11, 12), rss_bytes=30 * page, pss_bytes=9 * 1024, cpu_seconds=3 * 300 / ticks
    )
    unreadable = process_tree_memory(20, proc=tmp_path)
    assert unreadable is not None and unreadable.pss_bytes is None and unreadable.rss_bytes == 10 * page
    assert process_tree_memory(13, proc=tmp_path) is None
    assert process_tree_memory(99, proc=tmp_path) is None


def test_compilers_are_told_from_the_processes_of_a_rank(tmp_path: Path) -> None:
    tree = ((10, 1, "python"), (11, 10, "ninja"), (12, 11, "sh"), (13, 12, "x86_64-linux-gn"))
    for pid, parent, name in (*tree, (14, 13, "cc1plus"), (15, 10, "python"), (16, 15, "ptxas")):
        fake_process(tmp_path, pid, parent, name=name)
    page = os.sysconf("SC_PAGE_SIZE")
    memory = process_tree_memory(10, proc=tmp_path)
    assert memory is not None and (memory.rss_bytes, memory.pss_bytes) == (70 * page, 21 * 1024)
    assert (memory.compiler_rss_bytes, memory.compiler_pss_bytes) == (50 * page, 15 * 1024)
    # A compiler that is itself looked at is what it is.
    alone = process_tree_memory(14, proc=tmp_path)
    assert alone is not None and alone.compiler_rss_bytes == 0
    fake_process(tmp_path, 17, 10, pss_kib=None)
    unread = process_tree_memory(10, proc=tmp_path)
    assert unread is not None and (unread.pss_bytes, unread.compiler_pss_bytes) == (None, 0)


@pytest.mark.parametrize(
    ("folder", "with_cuda"),
    [
        ("torch-2.9.1.dist-info", True),
        ("torch-2.9.1+cu128.dist-info", True),
        ("torch-2.9.1+cpu.dist-info", False),
    ],
)
def test_the_kind_of_torch_is_told_by_what_lies_beside_it(
    folder: str, with_cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('it was loaded')")
    (tmp_path / "torchvision-0.24.0.dist-info").mkdir()
    (tmp_path / folder).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert torch_with_cuda() is with_cuda


def test_without_torch_there_is_no_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not torch_with_cuda()

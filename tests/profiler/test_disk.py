"""File systems by their mounts, and a real trial of the disk that the tests lie on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from llmtop.profiler.cost.nvme import NvmeTraffic, nvme_traffic, traffic_seconds
from llmtop.profiler.hardware.disk import FileSystem, file_system, free_bytes, measure
from tests.recorded_spec import recorded_spec

MIB = 1 << 20
MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:21 / {base} rw shared:1 - tmpfs tmpfs rw
24 23 0:22 / {base}/a\\040drive rw - xfs /dev/nvme0n1 rw
25 22 0:23 / {base}/net rw - nfs4 server:/x rw
26 22 0:24 / {base}/net rw - zfs pool rw
broken line
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("", "tmpfs"),
        ("a drive", "xfs"),
        ("a drive/not/made/yet", "xfs"),
        ("a driveway", "tmpfs"),
        ("net", "zfs"),
    ],
)
def test_the_innermost_and_newest_mount_counts(tmp_path: Path, folder: str, kind: str) -> None:
    (tmp_path / "a drive").mkdir()
    (tmp_path / "net").mkdir()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(base=tmp_path))
    found = file_system(tmp_path / folder, mounts=mounts)
    assert found is not None
    assert found.kind == kind
    outside = file_system(Path("/"), mounts=mounts)
    assert outside == FileSystem(kind="ext4", mount="/")
    assert file_system(tmp_path, mounts=tmp_path / "none") is None


def test_the_real_folder_has_a_file_system_and_room(tmp_path: Path) -> None:
    assert file_system(tmp_path) is not None
    assert file_system(Path("/proc")) == FileSystem(kind="proc", mount="/proc")
    assert (free_bytes(tmp_path / "not" / "there") or 0) > 0


def test_a_trial_measures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    speed = measure(tmp_path / "made" / "by the run", size_bytes=16 * MIB)
    assert speed.read_bytes_per_second is not None and speed.read_bytes_per_second > 0
    assert speed.write_bytes_per_second is not None and speed.write_bytes_per_second > 0
    assert list(tmp_path.iterdir()) == []


def test_a_trial_ends_by_the_clock(tmp_path: Path) -> None:
    """Every look at this clock is a second later: each lane stops after its first block."""
    ticks = iter(range(10_000))
    speed = measure(tmp_path, size_bytes=64 * MIB, seconds=0.5, clock=lambda: float(next(ticks)))
    assert speed.write_bytes_per_second is not None
    assert speed.write_bytes_per_second <= 4 * 4 * MIB


def test_a_file_system_without_direct_access_is_measured_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def without_direct(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", without_direct)
    speed = measure(tmp_path, size_bytes=16 * MIB)
    assert not speed.direct
    assert speed.read_bytes_per_second is not None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_raises() -> None:
    with pytest.raises(OSError, match="proc"):
        measure(Path("/proc/1/llmtop"))


def test_what_a_step_moves() -> None:
    options: dict[str, Any] = {"zero": 3, "nvme_path": "/x", "offload_optimizer": "nvme"}
    spec = recorded_spec("cuda", **options)
    params = 8.03e9
    # Measured with deepspeed 0.19.8 and two ranks: 15.8 bytes an element, each way.
    traffic = nvme_traffic(spec)
    assert traffic.read_bytes == traffic.write_bytes == pytest.approx(16 * params, rel=0.01)
    options |= {"offload_param": "nvme", "grad_accum": 4}
    both = nvme_traffic(recorded_spec("cuda", **options))
    # A rank's sub-groups are of a little over 1e9 elements, and none fits whole into the 1e9 that may stay in
    # host memory (measured: a model of fewer moves none).
    assert both.read_bytes - traffic.read_bytes == pytest.approx(4 * 2 * 2 * params, rel=0.01)
    assert both.write_bytes - traffic.write_bytes == pytest.approx(2 * params, rel=0.01)
    raw = {"zero_optimization": {"offload_param": {"max_in_cpu": 2_500_000_000}}}
    some = nvme_traffic(recorded_spec("cuda", **options, deepspeed=raw))
    # Two of each of the two ranks do.
    assert some.write_bytes - traffic.write_bytes == pytest.approx(2 * (params - 2 * 2 * 1e9), rel=0.05)
    assert nvme_traffic(recorded_spec("cuda")) == NvmeTraffic(read_bytes=0, write_bytes=0)


def test_seconds_of_traffic() -> None:
    traffic = NvmeTraffic(read_bytes=6, write_bytes=4)
    assert traffic_seconds(traffic, 3.0, 2.0) == 4.0
    assert traffic_seconds(traffic, None, 2.0) is None

"""The memory limit that the kernel enforces on a process: cgroup version 1 and 2, from its own group up.

The groups themselves are looked up here for other limits too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes a number near 2**63 where there is no limit."""


class CgroupMemory(Struct, frozen=True, kw_only=True):
    limit_bytes: int | None = None
    """The tightest limit of the process's group and all above it; None where there is none."""
    used_bytes: int | None = None
    """Of the group that has this limit (else of the process's own), without page cache that the kernel
    gives back when memory is short."""


class _Layout(Struct, frozen=True, kw_only=True):
    """File names of one cgroup version."""

    limit: str
    usage: str
    cache_key: str
    events: str


_V1 = _Layout(
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    cache_key="total_inactive_file",
    events="memory.oom_control",
)
_V2 = _Layout(limit="memory.max", usage="memory.current", cache_key="inactive_file", events="memory.events")
_LAYOUTS = {1: _V1, 2: _V2}


def cgroup_memory(pid: int | str = "self", *, proc: Path = Path("/proc")) -> CgroupMemory:
    """Limit and use of a process's cgroups; empty where the kernel shows none."""
    own: CgroupMemory | None = None
    tightest: CgroupMemory | None = None
    for folder, version in groups_of(proc / str(pid), "memory"):
        layout = _LAYOUTS[version]
        group = CgroupMemory(limit_bytes=_limit(folder / layout.limit), used_bytes=_used(folder, layout))
        own = own or group
        if group.limit_bytes is not None and (
            tightest is None or group.limit_bytes < (tightest.limit_bytes or NO_LIMIT_BYTES)
        ):
            tightest = group
    return tightest or own or CgroupMemory()


def oom_kills(pid: int | str = "self", *, proc: Path = Path("/proc")) -> int | None:
    """How often the kernel has killed for memory in a process's own group; None where it does not count."""
    for folder, version in groups_of(proc / str(pid), "memory"):
        return _keyed_number(folder / _LAYOUTS[version].events, "oom_kill")
    return None


def groups_of(process: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The group of a process (its folder in /proc) and every group above it, in each hierarchy that can limit
    what the controller limits (`memory`, `cpu`); with the version of each."""
    try:
        memberships = (process / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (process / "mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers == "":
            version, wanted = 2, "cgroup2"
        elif controller in controllers.split(","):
            version, wanted = 1, controller
        else:
            continue
        for mount in mounts:
            place = _mounted(mount, wanted)
            if place is not None:
                for folder in _upwards(*place, path):
                    yield folder, version
                break


def _mounted(mount: str, wanted: str) -> tuple[Path, str] | None:
    """Mount point and root of a mountinfo line, if it is the cgroup hierarchy that is wanted."""
    before, _, after = mount.partition(" - ")
    kind, _, options = after.split(" ", 2)
    root, point = before.split(" ")[3:5]
    is_v2 = wanted == "cgroup2" and kind == "cgroup2"
    is_v1 = kind == "cgroup" and wanted in options.split(",")
    return (Path(point), root) if is_v2 or is_v1 else None


def _upwards(point: Path, root: str, path: str) -> Iterator[Path]:
    """Folders from a group to the top of what is mounted."""
    # Inside a container the mount may show only a part of the tree, and the path may be the host's.
    inside = path.removeprefix(root) if root != "/" and path.startswith(root) else path
    parts = [part for part in inside.split("/") if part not in ("", "..")]
    folder = point.joinpath(*parts)
    if not folder.is_dir():
        folder, parts = point, []
    for depth in range(len(parts), -1, -1):
        yield point.joinpath(*parts[:depth])


def _limit(path: Path) -> int | None:
    value = _number(path)
    return None if value is None or value >= NO_LIMIT_BYTES else value


def _used(folder: Path, layout: _Layout) -> int | None:
    usage = _number(folder / layout.usage)
    if usage is None:
        return None
    return max(0, usage - (_keyed_number(folder / "memory.stat", layout.cache_key) or 0))


def _keyed_number(path: Path, key: str) -> int | None:
    """A number from a file of lines `key number`."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split(" ", 1)[0] == key), None)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None

"""Which hosts a run is to use: a hostfile and its filters, read as DeepSpeed's launcher reads them.

From deepspeed 0.19.8 `launcher/runner.py`: `_parse_hostfile`, `parse_resource_filter` and
`apply_num_nodes_and_gpus`; what that finds out later or never (more GPUs than slots) is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from llmtop.presets.errors import UsageError, nearest
from llmtop.presets.foreign import read_bytes, why_unreadable
from llmtop.profiler.record.hosts import LONGEST_HOST_NAME, Host, is_host_name
from llmtop.profiler.units import counted

DEFAULT_HOSTFILE = Path("/job/hostfile")
"""Where DeepSpeed looks for one (`DLTS_HOSTFILE`)."""
_LARGEST_BYTES = 16 << 20
_MOST_TOLD = 8
"""Names in a message."""
_MOST_DIGITS = 4
"""Of the slots of a host."""
_LINE = re.compile(r"^(\S+)\s+slots=(\d+)")
_FORM = "one host a line, as: worker-1 slots=8"

Pool = dict[str, tuple[int, ...]]
"""Host to the numbers of its slots, in the order of the ranks."""


def read_hostfile(path: Path) -> Pool:
    """Raises UsageError for a file that is none, naming its line."""
    try:
        text = read_bytes(path, _LARGEST_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = why_unreadable(error) if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"hostfile {path} cannot be read", why=why, fix=_FORM) from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, name: str = "hostfile") -> Pool:
    pool: Pool = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise UsageError(f"{name}, line {number}: '{line[:80]}' names no host with its slots", fix=_FORM)
        host = match.group(1)
        require_host_name(host, f"{name}, line {number}")
        if host in pool:
            raise UsageError(f"{name}, line {number}: {host} is there twice", fix="give each host one line")
        slots = match.group(2)
        if len(slots) > _MOST_DIGITS:
            raise UsageError(f"{name}, line {number}: {host} has more slots than any machine", fix=_FORM)
        pool[host] = tuple(range(int(slots)))
    if not pool:
        raise UsageError(f"{name} names no host", fix=_FORM)
    return pool


def require_host_name(host: str, where: str) -> None:
    """Raise UsageError for a word that ssh would take for an option, or that can be no folder's name."""
    if not is_host_name(host):
        raise UsageError(
            f"{where}: '{host[:80]}' is not the name of a host",
            why="it begins with a letter or digit, has letters, digits and ._:@%+- in it, and is at most"
            f" {LONGEST_HOST_NAME} long",
            fix="give it a name in ~/.ssh/config",
        )


def choose(pool: Mapping[str, tuple[int, ...]], *, include: str = "", exclude: str = "") -> Pool:
    """The hosts and slots that a filter leaves, in the order of the hostfile.

    `NAME[:SLOT[,SLOT ...]][@NAME ...]`; without slots, all of that host. Raises UsageError.
    """
    if include and exclude:
        raise UsageError("--include and --exclude cannot both be given", fix="leave one out")
    if not include and not exclude:
        return dict(pool)
    option = "--include" if include else "--exclude"
    named = _parse_filter(include or exclude, option, pool)
    if include:
        chosen = {host: named[host] or slots for host, slots in pool.items() if host in named}
    else:
        chosen = {host: _without(slots, named.get(host)) for host, slots in pool.items()}
    kept = {host: slots for host, slots in chosen.items() if slots}
    if not kept:
        raise UsageError(f"{option} '{include or exclude}' leaves no host", fix="leave some slots")
    return kept


def _without(slots: tuple[int, ...], excluded: tuple[int, ...] | None) -> tuple[int, ...]:
    """None: nothing is excluded; none named: all are."""
    if excluded is None:
        return slots
    return tuple(slot for slot in slots if slot not in excluded) if excluded else ()


def _parse_filter(text: str, option: str, pool: Mapping[str, tuple[int, ...]]) -> Pool:
    """Host to the slots named of it; none: all."""
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, slots = part.partition(":")
        numbers = slots.split(",") if colon else []
        if host not in pool:
            guess = nearest(host, list(pool))
            raise UsageError(
                f"{option}: host '{host}' is not in the hostfile",
                fix=f"did you mean {guess}?" if guess else f"it has: {_names(pool)}",
            )
        if not all(number.strip().isdecimal() for number in numbers):
            raise UsageError(f"{option}: '{part}' is not HOST:SLOT,SLOT", fix="as worker-1:0,2")
        found = {int(number) for number in numbers}
        missing = sorted(found - set(pool[host]))
        if missing:
            raise UsageError(
                f"{option}: host {host} has no slot {missing[0]}",
                why=f"the hostfile gives it {counted(len(pool[host]), 'slot')}, counted from 0",
            )
        named.setdefault(host, set()).update(found)
    return {host: tuple(sorted(slots)) for host, slots in named.items()}


def take(pool: Mapping[str, tuple[int, ...]], *, nodes: int | None = None, gpus: int | None = None) -> Pool:
    """The first hosts, and the first slots of each. Raises UsageError where there are not as many."""
    if nodes is not None and nodes > len(pool):
        raise UsageError(
            f"--nodes {nodes}: there {'is' if len(pool) == 1 else 'are'} {counted(len(pool), 'host')}",
            why=f"after all filters: {_names(pool)}",
        )
    taken = dict(list(pool.items())[:nodes])
    if gpus is not None:
        short = next((host for host, slots in taken.items() if len(slots) < gpus), None)
        if short is not None:
            raise UsageError(f"--gpus {gpus}: host {short} has {counted(len(taken[short]), 'slot')}")
        taken = {host: slots[:gpus] for host, slots in taken.items()}
    return taken


def _names(pool: Mapping[str, tuple[int, ...]]) -> str:
    more = len(pool) - _MOST_TOLD
    return ", ".join(list(pool)[:_MOST_TOLD]) + (f" and {more:,} more" if more > 0 else "")


def with_ranks(pool: Mapping[str, tuple[int, ...]]) -> tuple[Host, ...]:
    """Hosts with their ranks, in order, as many as each has slots. Raises UsageError for one without."""
    first = 0
    found = []
    for host, slots in pool.items():
        if not slots:
            raise UsageError(f"host {host} has no slot", fix=f"leave it out: --exclude {host}")
        found.append(Host(name=host, first_rank=first, slots=tuple(slots)))
        first += len(slots)
    return tuple(found)

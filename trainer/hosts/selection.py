"""Which files of a run on another machine come here: all of them, or what is looked at."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from llmtop.profiler.fleet.part import MOST_RANKS_READ
from llmtop.profiler.record.hosts import Host, Hosts
from llmtop.trainer.hosts.twin import Kept

Place = Literal["whole", "parts", ""]
"""Where files are kept: with whole logs, with logs of which only the end came, or until the command ends."""


class LogsWanted(Struct, frozen=True, kw_only=True):
    """What ranks wrote to standard output and error."""

    rank: int | None = None
    """None: all."""
    tail: int | None = None
    """Of each only so many lines at its end."""


Wanted = Literal["whole", "screen", "lines"] | LogsWanted
"""The whole record; or what a screen shows first, of a large run without any rank; or that with the ranks of
the first host, which tell the loss."""

_DOCUMENTS = ("*.json", "*.pid", "settings/*/*.json", "quantized/*.json")
"""What a run is. Signs of life of its hosts are for the launching machine alone."""
_LEAD_LOGS = ("supervisor*.jsonl",)
# Requests are files of the run like any other: its supervisor there sees them as if they were made there.
_REQUESTS = ("control/*.json",)
_WHOLE = Kept(
    grow=("*.jsonl", "*.log", "hosts/*/*.jsonl", "hosts/*/*.log", "stacks/*.txt"),
    last=_LEAD_LOGS,
    whole=(*_DOCUMENTS, "hosts/*/host.json", "hosts/*/*.pid", "snapshots/*"),
    sent=_REQUESTS,
)
_NO_RANK = Kept(grow=("supervisor.log",), last=_LEAD_LOGS, whole=_DOCUMENTS, sent=_REQUESTS)
_SUMMARIES = (("hosts/*/summary*.jsonl", 3, 1 << 16),)
"""A host says all that is known in each of its summaries: of many that were missed the newest are enough."""


def select(wanted: Wanted, hosts: Hosts | None) -> tuple[Kept, Place]:
    """What comes of a run over `hosts`, or on one machine, and where it is kept."""
    if isinstance(wanted, LogsWanted):
        name = "rank-*.log" if wanted.rank is None else f"rank-{wanted.rank}.log"
        if wanted.tail is not None:
            return replace(_NO_RANK, newest=((name, wanted.tail, None),)), ""
        return replace(_NO_RANK, grow=(*_NO_RANK.grow, name)), "whole"
    if wanted == "whole" or hosts is None or hosts.world_size <= MOST_RANKS_READ:
        return _WHOLE, "whole"
    kept = replace(_NO_RANK, newest=_SUMMARIES)
    if wanted == "lines" and hosts.hosts:
        kept = with_part(kept, hosts.hosts[0], hosts.hosts[0].ranks)
    return kept, "parts"


def with_part(kept: Kept, host: Host, ranks: range) -> Kept:
    """The same and these ranks of a host, with what the host itself has written."""
    own = f"hosts/{host.name}"
    grow = [f"{own}/hardware*.jsonl", f"{own}/supervisor.log"]
    for rank in ranks:
        grow += (f"rank-{rank}.jsonl", f"rank-{rank}.*.jsonl", f"rank-{rank}.log", f"stacks/rank-{rank}.txt")
    return replace(
        kept,
        grow=_joined(kept.grow, grow),
        last=_joined(kept.last, [f"{own}/supervisor*.jsonl"]),
        whole=_joined(kept.whole, [f"{own}/host.json"]),
    )


def _joined(there: tuple[str, ...], more: list[str]) -> tuple[str, ...]:
    return (*there, *(name for name in more if name not in there))

"""The hosts of a Slurm allocation, from the variables that Slurm sets in it (man pages of sbatch, salloc)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from llmtop.presets.errors import UsageError
from llmtop.trainer.hosts.hostfile import Pool, require_host_name

_WHOLE = re.compile(r"(?:[^\[\],]+(?:\[[^\[\]]*\])?)+")
_PART = re.compile(r"([^\[\],]+)(?:\[([^\]]*)\])?")
_GPUS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE")


def in_allocation(environment: Mapping[str, str]) -> bool:
    return bool(environment.get("SLURM_JOB_NODELIST"))


def allocation(environment: Mapping[str, str], *, slots: int | None) -> Pool:
    """Each node of the allocation with its slots. Raises UsageError where nothing says how many.

    Slurm hides the GPUs that are not the job's, so slots are counted from 0.
    """
    names = tuple(expand(environment["SLURM_JOB_NODELIST"]))
    count = slots if slots is not None else _slots(environment)
    if not count:
        raise UsageError(
            "the allocation does not say how many GPUs a node has",
            why=f"none of {', '.join(_GPUS)} is set",
            fix="--gpus N",
        )
    for name in names:
        require_host_name(name, "SLURM_JOB_NODELIST")
    return {name: tuple(range(count)) for name in names}


def expand(names: str) -> Iterator[str]:
    """`gpu[01-03,7],login1`: gpu01, gpu02, gpu03, gpu7, login1. Raises UsageError for what is none."""
    for part in _parts(names):
        pieces = [[text] if not ranges else list(_numbers(ranges)) for text, ranges in _pieces(part)]
        yield from map("".join, itertools.product(*pieces))


def _parts(names: str) -> list[str]:
    """At the commas outside of brackets."""
    parts = re.split(r",(?![^\[]*\])", names)
    if not all(_WHOLE.fullmatch(part) for part in parts):
        raise UsageError(f"'{names}' is no list of nodes as Slurm writes them")
    return parts


def _pieces(part: str) -> Iterator[tuple[str, str]]:
    """Text as (text, ''), brackets as ('', what they hold)."""
    for text, ranges in _PART.findall(part):
        yield text, ""
        if ranges:
            yield "", ranges


def _numbers(ranges: str) -> Iterator[str]:
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        if not first.isdecimal() or last and not last.isdecimal():
            raise UsageError(f"'[{ranges}]' is no range of nodes as Slurm writes them")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


def _slots(environment: Mapping[str, str]) -> int | None:
    """`8`, or as `h200:8`, or `8(x2)` for two nodes of 8."""
    for name in _GPUS:
        match = re.fullmatch(r"(?:[^:,]+:)?(\d+)(?:\(x\d+\))?", environment.get(name, ""))
        if match:
            return int(match.group(1))
    return None

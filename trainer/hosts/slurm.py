"""The hosts of a Slurm allocation: from the variables that Slurm sets in it, and from what scontrol tells."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from llmtop.presets.errors import UsageError
from llmtop.profiler.units import counted
from llmtop.trainer.hosts.hostfile import Pool, require_host_name

_WHOLE = re.compile(r"(?:[^\[\],]+(?:\[[^\[\]]*\])?)+")
_PART = re.compile(r"([^\[\],]+)(?:\[([^\]]*)\])?")
_NODES = re.compile(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\d+ GRES=(\S*)")
_GPU = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)")
_VARIABLES = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_SCONTROL_SECONDS = 30.0


def in_allocation(environment: Mapping[str, str]) -> bool:
    return bool(environment.get("SLURM_JOB_NODELIST"))


def allocation(environment: Mapping[str, str], *, slots: int | None) -> Pool:
    """Each node of the allocation with its slots. Raises UsageError where nothing says how many.

    Slurm hides the GPUs that are not the job's, so slots are counted from 0.
    """
    names = tuple(expand(environment["SLURM_JOB_NODELIST"]))
    for name in names:
        require_host_name(name, "SLURM_JOB_NODELIST")
    gpus = job_gpus(environment)
    if slots is not None:
        short = next((name for name in names if 0 < gpus.get(name, 0) < slots), None)
        if short is not None:
            raise UsageError(f"--gpus {slots}: the job has {counted(gpus[short], 'GPU')} on {short}")
        return {name: tuple(range(slots)) for name in names}
    counts = gpus if all(gpus.get(name) for name in names) else _told(names, environment)
    if not counts:
        raise UsageError(
            "the allocation does not say how many GPUs a node has",
            why=f"scontrol names none, and none of {', '.join(_VARIABLES)} is set",
            fix="--gpus N",
        )
    return {name: tuple(range(counts[name])) for name in names}


def job_gpus(environment: Mapping[str, str]) -> dict[str, int]:
    """Nodes of the job to the GPUs that it has there; empty where scontrol does not tell.

    Of the variables none tells it in every allocation: `salloc --gres=gpu:8` sets none (Slurm 22.05).
    """
    program, job = shutil.which("scontrol"), environment.get("SLURM_JOB_ID", "")
    if program is None or not job:
        return {}
    command = [program, "--oneliner", "show", "job", "--details", job]
    try:
        told = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_SCONTROL_SECONDS,
            env=dict(environment),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_job_gpus(told.stdout)


def parse_job_gpus(job: str) -> dict[str, int]:
    """From what scontrol prints of a job, as `Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0-1)`."""
    return {
        name: sum(map(int, _GPU.findall(resources)))
        for nodes, resources in _NODES.findall(job)
        for name in expand(nodes)
    }


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


def _told(names: tuple[str, ...], environment: Mapping[str, str]) -> dict[str, int]:
    """By the variables: `8`, or as `h200:8`, or `8(x2)` for two nodes of 8; else a slot a task."""
    for variable in _VARIABLES:
        match = re.fullmatch(r"(?:[^:,]+:)?(\d+)(?:\(x\d+\))?", environment.get(variable, ""))
        if match:
            return dict.fromkeys(names, int(match.group(1)))
    if "SLURM_NTASKS" not in environment:
        return {}
    counts = list(_tasks(environment.get("SLURM_TASKS_PER_NODE", "")))
    return dict(zip(names, counts, strict=True)) if len(counts) == len(names) else {}


def _tasks(text: str) -> Iterator[int]:
    """`2(x3),1`: 2, 2, 2, 1."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        yield from itertools.repeat(int(count), int(times or 1))

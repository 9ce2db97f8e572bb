"""The options of `run` that say on which hosts, and how they are reached."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.hosts import Hosts, Launcher

_LAUNCHERS = ("ssh", "pdsh", "srun")
_OTHERS = ("include", "exclude", "launcher", "env", "master_addr", "remote_python")


class Chosen(Struct, frozen=True, kw_only=True):
    hosts: Hosts
    variables: dict[str, str]
    """That were given with a value: for the lead, which hands them on."""


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hosts")
    group.add_argument("--hostfile", metavar="FILE", help="a line a host: NAME slots=N, as DeepSpeed has it")
    group.add_argument(
        "--include", default="", metavar="FILTER", help="only these: HOST[:SLOT,SLOT]@HOST ..."
    )
    group.add_argument("--exclude", default="", metavar="FILTER", help="all but these, in the same form")
    group.add_argument(
        "--launcher", choices=_LAUNCHERS, help="default: srun inside a Slurm allocation, else ssh"
    )
    group.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for every host"
    )
    group.add_argument(
        "--master-addr", default="", metavar="ADDRESS", help="of the first host, for the others"
    )
    group.add_argument(
        "--remote-python", default="", metavar="FILE", help="the interpreter there; default: this one's path"
    )


def chosen_hosts(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Chosen | None:
    """The hosts of a run over several; None for one on this machine. Raises UsageError.

    `gpus`, `nodes` and, of uneven hosts, `total_gpus` become those of the hosts, as if given.
    """
    from llmtop.trainer.hosts import hostfile, slurm

    nodes, gpus, all_gpus = (_count(args, option) for option in ("nodes", "gpus", "total_gpus"))
    filtered = bool(args.include or args.exclude)
    # Filters and counts exclude each other, so in an allocation filters have to do without.
    of_allocation = slurm.in_allocation(environment) and (filtered or args.launcher == "srun")
    if args.hostfile is None and (nodes or 1) == 1 and not of_allocation:
        _refuse_without_hosts(args)
        return None
    if filtered and (nodes is not None or gpus is not None):
        # As deepspeed 0.19.8 has it (`launcher/runner.py:main`).
        raise UsageError(
            "--include and --exclude do not go with --nodes and --gpus", fix="name slots: HOST:0,1"
        )
    in_slurm = args.hostfile is None and slurm.in_allocation(environment)
    if in_slurm:
        pool = slurm.allocation(environment, slots=gpus)
    else:
        pool = hostfile.read_hostfile(_hostfile(args.hostfile, nodes))
    kept = hostfile.take(
        hostfile.choose(pool, include=args.include, exclude=args.exclude), nodes=nodes, gpus=gpus
    )
    hosts = hostfile.with_ranks(kept)
    counts = [len(host.slots) for host in hosts]
    args.nodes, args.gpus = len(hosts), max(counts)
    if all_gpus is not None and all_gpus != sum(counts):
        raise _other_total(all_gpus, sum(counts))
    if len(set(counts)) > 1:
        args.total_gpus = sum(counts)
    names, values = _variables(args.env)
    launcher: Launcher = args.launcher or ("srun" if in_slurm else "ssh")
    return Chosen(
        hosts=Hosts(
            hosts=hosts,
            launcher=launcher,
            choose_devices=any(slots != pool[name] for name, slots in kept.items()),
            python=args.remote_python or sys.executable,
            master_address=args.master_addr,
            variables=names,
        ),
        variables=values,
    )


def require_ranks_of(spec: RunSpec, hosts: Hosts) -> None:
    """Raise UsageError where a recipe counts other GPUs than the hosts have: each rank is told how many
    there are."""
    if spec.world_size != hosts.world_size:
        raise _other_total(spec.world_size, hosts.world_size)


def _other_total(asked: int, there: int) -> UsageError:
    return UsageError(
        f"total_gpus = {asked}, and the hosts have {there} slots together",
        fix="leave it out: the hosts say how many there are",
    )


def _count(args: argparse.Namespace, option: str) -> int | None:
    """Options of a run come as they were written."""
    given = getattr(args, option, None)
    if given is None:
        return None
    text, flag = str(given).strip(), "--" + option.replace("_", "-")
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{flag} {text}: no number of {flag[2:]}", fix=f"a whole number: {flag} 2")
    return int(text)


def _hostfile(given: str | None, nodes: int | None) -> Path:
    from llmtop.trainer.hosts.hostfile import DEFAULT_HOSTFILE

    if given is not None:
        return Path(given).expanduser()
    if DEFAULT_HOSTFILE.exists():
        return DEFAULT_HOSTFILE
    raise UsageError(
        f"--nodes {nodes} needs to be told which hosts",
        why=f"this is no Slurm allocation, and there is no {DEFAULT_HOSTFILE}",
        fix="--hostfile FILE with a line for each: worker-1 slots=8",
    )


def _refuse_without_hosts(args: argparse.Namespace) -> None:
    for option in _OTHERS:
        if getattr(args, option):
            raise UsageError(
                f"--{option.replace('_', '-')} is for a run over hosts",
                why="none are named",
                fix="--hostfile FILE, or --nodes N inside a Slurm allocation",
            )


def _variables(given: list[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names of all, and the values of those that have one. Raises UsageError for one that is not set."""
    names, values = [], {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name.isidentifier():
            raise UsageError(f"--env {name} is no name of a variable", fix="--env NAME or --env NAME=VALUE")
        if equals:
            values[name] = value
        elif name not in os.environ:
            raise UsageError(f"--env {name} is not set here", fix=f"give it a value: --env {name}=VALUE")
        names.append(name)
    return tuple(dict.fromkeys(names)), values

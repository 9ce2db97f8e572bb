"""What each host starts for a command of the user's own, so that all of it is one job.

`torchrun` takes what it is not told from the environment, also below a shell script (`PET_*`: torch 2.13
`distributed/argparse_util.py`); DeepSpeed's launcher starts one node's ranks by `--no_ssh --node_rank`
(deepspeed 0.19.8 `launcher/runner.py`); a plain Python script is started once a slot, in the environment that
both make for a rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from llmtop.presets.errors import UsageError
from llmtop.profiler.record.hosts import Host, Hosts
from llmtop.profiler.units import counted

Kind = Literal["torchrun", "deepspeed", "python", "other"]
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_TAKEN: dict[Kind, tuple[str, ...]] = {
    "torchrun": (
        *("--nnodes", "--node-rank", "--master-addr", "--master-port", "--standalone", "--rdzv-endpoint"),
    ),
    "deepspeed": (
        *("-H", "--hostfile", "-i", "--include", "-e", "--exclude", "--num-nodes", "--num-gpus"),
        *("--num-accelerators", "--master-addr", "--master-port", "--node-rank", "--launcher", "--no-ssh"),
        *("--force-multi", "--autotuning", "--launcher-args", "--ssh-port"),
    ),
}
"""Options of a launcher that say where the ranks are: llmtop says that."""
_SWITCHES = frozenset(
    {
        *("--module", "-m", "--no-python", "--no-local-rank", "--standalone", "--no-ssh", "--no-ssh-check"),
        *("--force-multi", "--save-pid", "--bind-cores-to-rank", "--quiet", "-q"),
        *("--run-path", "--virtual-local-rank", "--use-env"),
    }
)
"""Options without a value."""
_HOSTFILE = "hostfile"


class Process(Struct, frozen=True, kw_only=True):
    """One that a host's supervisor starts."""

    number: int
    """Of a rank that it is, or the first that it starts."""
    command: tuple[str, ...]
    variables: dict[str, str]


def kind_of(command: Sequence[str]) -> Kind:
    name = Path(command[0]).name
    if name == "torchrun" or _module(command) in _TORCHRUN_MODULES:
        return "torchrun"
    if name in ("deepspeed", "ds", "deepspeed.pt") or _module(command) == "deepspeed.launcher.runner":
        return "deepspeed"
    return "python" if _PYTHON.fullmatch(name) else "other"


def numbers(command: Sequence[str], host: Host) -> range:
    """Under which a host's processes are known: a rank each, or the first for one that starts them all."""
    return host.ranks if kind_of(command) == "python" else range(host.first_rank, host.first_rank + 1)


def check_over_hosts(command: Sequence[str], hosts: Hosts) -> None:
    """Raise UsageError for a command that cannot be one job on these hosts."""
    name = Path(command[0]).name
    if name == "accelerate" or name == "accelerate-launch" or _module(command).startswith("accelerate."):
        raise UsageError(
            f"{name} is not started on hosts",
            why="accelerate's launcher gives every host as many processes, of a number that it is told",
            fix="torchrun train.py: a script with accelerate in it takes its place from there as well",
        )
    kind = kind_of(command)
    for option, value in _given(command, kind):
        if option in _TAKEN.get(kind, ()):
            raise UsageError(
                f"{name} {option} and hosts exclude each other",
                why="llmtop tells the launcher on each host where all ranks are",
                fix="leave it out; --hostfile, --include and --master-addr of llmtop run say it",
            )
        if option == "--nproc-per-node":
            _check_count(value, hosts)
        if option == "--rdzv-backend" and value != "static":
            raise UsageError(
                f"--rdzv-backend {value} and hosts exclude each other",
                why="it numbers hosts as they come, and whose ranks are whose is known before",
                fix="leave it out: the ranks meet at the first host, which the others are told",
            )


def processes(
    command: Sequence[str], hosts: Hosts, host: Host, *, address: str, port: int, folder: Path
) -> list[Process]:
    """Of one host. `folder` is its own, for a file that a launcher reads."""
    kind, node = kind_of(command), hosts.hosts.index(host)
    if kind == "python":
        return [
            Process(
                number=rank,
                command=tuple(command),
                variables={
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank - host.first_rank),
                    "WORLD_SIZE": str(hosts.world_size),
                    "LOCAL_WORLD_SIZE": str(len(host.slots)),
                    "MASTER_ADDR": address,
                    "MASTER_PORT": str(port),
                },
            )
            for rank in host.ranks
        ]
    words = list(command)
    if kind == "deepspeed":
        path = folder / _HOSTFILE
        path.write_text(deepspeed_hostfile(hosts), encoding="utf-8")
        at = words.index("deepspeed.launcher.runner") + 1 if "-m" in words[:2] else 1
        words[at:at] = [
            *("--no_ssh", f"--node_rank={node}", f"--master_addr={address}", f"--master_port={port}"),
            *(f"--hostfile={path}", f"--include={_deepspeed_filter(hosts)}"),
        ]
    return [
        Process(
            number=host.first_rank,
            command=tuple(words),
            variables=_of_node(hosts, host, node=node, address=address, port=port),
        )
    ]


def deepspeed_hostfile(hosts: Hosts) -> str:
    """Nothing is reached by these names, and DeepSpeed's filter has words of its own in real ones."""
    return "".join(
        f"{_node_name(node)} slots={max(host.slots) + 1}\n" for node, host in enumerate(hosts.hosts)
    )


def _deepspeed_filter(hosts: Hosts) -> str:
    return "@".join(
        f"{_node_name(node)}:{','.join(map(str, host.slots))}" for node, host in enumerate(hosts.hosts)
    )


def _node_name(node: int) -> str:
    return f"node-{node}"


def _of_node(hosts: Hosts, host: Host, *, node: int, address: str, port: int) -> dict[str, str]:
    """What torchrun reads, also below a script; and the same for a script that has its own way."""
    count, slots = str(len(hosts.hosts)), str(len(host.slots))
    return {
        "PET_NNODES": count,
        "PET_NODE_RANK": str(node),
        "PET_NPROC_PER_NODE": slots,
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": str(port),
        "NNODES": count,
        "NODE_RANK": str(node),
        "NPROC_PER_NODE": slots,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def _module(command: Sequence[str]) -> str:
    """That `python -m` runs; empty for another command."""
    python = _PYTHON.fullmatch(Path(command[0]).name) is not None
    return command[2] if python and len(command) > 2 and command[1] == "-m" else ""


def _given(command: Sequence[str], kind: Kind) -> list[tuple[str, str]]:
    """The launcher's own options with their values, ahead of the script: `--node_rank` as `--node-rank`."""
    if kind not in ("torchrun", "deepspeed"):
        return []
    words = list(command[3:] if _module(command) else command[1:])
    found = []
    while words and words[0].startswith("-"):
        option, equals, value = words.pop(0).partition("=")
        option = option if len(option) == 2 else option.replace("_", "-")
        # As argparse has it, what begins with a dash is no value.
        if not equals and option not in _SWITCHES and words and not words[0].startswith("-"):
            value = words.pop(0)
        found.append((option, value))
    return found


def _check_count(value: str, hosts: Hosts) -> None:
    """A number of processes has to be that of the slots, which is what is asked for without it."""
    other = next((host for host in hosts.hosts if str(len(host.slots)) != value), None)
    if other is not None:
        raise UsageError(
            f"--nproc-per-node {value}: host {other.name} has {counted(len(other.slots), 'slot')}",
            why="ranks are counted by the slots of the hosts",
            fix="leave it out, or change the slots: --gpus, --include",
        )

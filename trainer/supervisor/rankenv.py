"""The command and the environment of each rank."""

from __future__ import annotations

import os
import random
import re
import shlex
import socket
import string
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.leftovers import RUN_MARK
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.pdeath import SUPERVISOR_PID
from llmtop.trainer.supervisor.extensions import VARIABLE

RUN_ID = RUN_MARK
"""Marks every process of a run."""
WORKER_COMMAND = "LLMTOP_WORKER_COMMAND"
"""Started in place of the worker, with the run directory as last argument; for tests."""
ARCH_LIST = "TORCH_CUDA_ARCH_LIST"
"""The GPU architectures that torch compiles ops for."""
_NAMED_ARCHS: dict[str, str] = {
    "Volta": "7.0",
    "Turing": "7.5",
    "Ampere": "8.0;8.6",
    "Ada": "8.9",
    "Hopper": "9.0",
    "Blackwell": "10.0",
}
"""Names that torch takes (torch 2.13 `utils/cpp_extension.py`); it takes `native` too, for what is there."""
_ADDRESS = "127.0.0.1"
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_UNPRIVILEGED_PORT = 1024
_PORT_TRIES = 20


def worker_command(run: RunDir, environment: Mapping[str, str]) -> list[str]:
    """What every rank runs. `-P`: modules in the folder that a person stands in are not the worker's."""
    other = environment.get(WORKER_COMMAND)
    command = shlex.split(other) if other else [sys.executable, "-P", "-m", "llmtop.trainer.worker"]
    return [*command, str(run.path)]


def rank_environment(
    run: RunDir,
    rank: int,
    *,
    port: int,
    extensions: Path,
    environment: Mapping[str, str],
    setting: int | None = None,
    address: str = _ADDRESS,
    first_rank: int = 0,
    local_ranks: int | None = None,
) -> dict[str, str]:
    """The environment of one rank on top of the supervisor's own; to be asked for by the supervisor.

    `setting` is that of the run; by default the one in force. `address` is where all ranks meet, `first_rank`
    the lowest one of this machine, which has `local_ranks`; by default as many as a node has.
    """
    spec = run.spec(setting)
    here = spec.options.gpus if local_ranks is None else local_ranks
    return {
        "TOKENIZERS_PARALLELISM": "false",
        # NVML numbers devices by bus, CUDA by speed unless told: one number must mean one device.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # Kineto tells each start and end of a profiler above its every other level (torch 2.13); what a
        # recording held is in the events.
        "KINETO_LOG_LEVEL": "6",
        **environment,
        **_arch_list(environment),
        RUN_ID: run.run_id,
        SUPERVISOR_PID: str(os.getpid()),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - first_rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu" if spec.on_cpu else "cuda",
        "OMP_NUM_THREADS": str(threads_of(spec, environment, here)),
        "PYTHONUNBUFFERED": "1",
        VARIABLE: str(extensions),
    }


def deepspeed_archs(arch_list: str) -> str:
    """A TORCH_CUDA_ARCH_LIST that DeepSpeed can read; empty where it then asks the devices.

    It takes every part of an item for a number: the `0a` of `9.0a`, and torch's names of generations
    (deepspeed 0.19.8 `ops/op_builder/builder.py:compute_capability_args`).
    """
    for name, numbers in _NAMED_ARCHS.items():
        arch_list = re.sub(rf"\b{re.escape(name)}(?!\w|\+Tegra)", numbers, arch_list, flags=re.IGNORECASE)
    items = re.split(r"[;,\s]+", arch_list.strip(";," + string.whitespace))
    plain = [re.sub(r"^(\d+\.\d+)[a-z]+", r"\1", item) for item in items]
    return ";".join(dict.fromkeys(item for item in plain if re.fullmatch(r"\d+\.\d+(\+PTX)?", item)))


def free_port() -> int:
    """A port that nothing listens on now.

    Rank 0 takes it only once its imports are done, seconds later: so it is none that the kernel hands out
    to connections meanwhile, as long as one below those is free.
    """
    below = list(range(_FIRST_UNPRIVILEGED_PORT, _first_ephemeral_port()))
    for port in [*random.sample(below, min(_PORT_TRIES, len(below))), 0]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise OSError("no port of this machine is free")


def _first_ephemeral_port() -> int:
    """Where the ports begin that the kernel gives to whoever asks for any."""
    try:
        return int(_EPHEMERAL_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        # No such file outside Linux and in some sandboxes: then every port may be handed out.
        return _FIRST_UNPRIVILEGED_PORT


def _arch_list(environment: Mapping[str, str]) -> dict[str, str]:
    given = environment.get(ARCH_LIST)
    return {ARCH_LIST: deepspeed_archs(given)} if given else {}


def threads_of(spec: RunSpec, environment: Mapping[str, str], ranks: int | None = None) -> int:
    """CPU threads of a rank: the option, else the environment, else a fair share of the cores."""
    given = environment.get("OMP_NUM_THREADS", "")
    if spec.options.threads_per_rank:
        return spec.options.threads_per_rank
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return max(1, len(os.sched_getaffinity(0)) // (ranks or spec.options.gpus))

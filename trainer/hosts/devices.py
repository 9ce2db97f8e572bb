"""The GPUs of one host, as far as its ranks see them."""

from __future__ import annotations

from collections.abc import Mapping

from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.profiler.record.hosts import Host, Hosts

_DEVICES = "CUDA_VISIBLE_DEVICES"


def chosen_devices(host: Host, hosts: Hosts, environment: Mapping[str, str]) -> dict[str, str]:
    """Slots are numbers of GPUs; in Slurm, of those that it lets the job see."""
    if not hosts.choose_devices:
        return {}
    seen = environment.get(_DEVICES, "").split(",") if hosts.launcher == "srun" else []
    found = [seen[slot] if slot < len(seen) and seen[slot] else str(slot) for slot in host.slots]
    return {_DEVICES: ",".join(found)}


def visible_gpus() -> int | None:
    """How many there are; None where the driver tells nothing."""
    reader = NvmlReader()
    try:
        return None if reader.problem else len(reader.visible_indices())
    finally:
        reader.close()

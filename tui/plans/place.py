"""Where a plan would run: the GPUs that were chosen for it, or those that it would be given here."""

from __future__ import annotations

from itertools import islice

from msgspec import Struct

from llmtop.presets.resolve import Machine
from llmtop.presets.spec import RunSpec
from llmtop.profiler.hardware.gpuuse import GpusInUse, GpuUse


class Place(Struct, frozen=True, kw_only=True):
    """As far as it is this machine."""

    gpus: tuple[GpuUse, ...] = ()
    machine: Machine | None = None

    @property
    def host_limit_bytes(self) -> int | None:
        """What a run can use of its memory; None for a plan that is not for this machine, and on the CPU
        kind, whose verdict is about that memory already."""
        if self.machine is None or self.machine.gpu == "cpu":
            return None
        return self.machine.host_memory_bytes


def still_chosen(spec: RunSpec | None, devices: tuple[GpuUse, ...]) -> tuple[GpuUse, ...]:
    """The GPUs that were chosen by hand, as long as the plan is for so many of that kind."""
    if spec is None or not devices or spec.options.nodes != 1 or spec.options.gpus != len(devices):
        return ()
    return devices if spec.gpu.name == devices[0].preset else ()


def place_of(
    spec: RunSpec | None, machine: Machine | None, in_use: GpusInUse, chosen: tuple[GpuUse, ...]
) -> Place:
    """The chosen GPUs, else those that CUDA would use here, as they were read last."""
    if spec is None or machine is None or spec.options.nodes != 1:
        return Place()
    newest = {gpu.index: gpu for gpu in in_use.gpus}
    gpus = tuple(newest.get(gpu.index, gpu) for gpu in chosen)
    if spec.gpu.name != machine.gpu:
        return Place(gpus=gpus)
    like = (gpu for gpu in in_use.gpus if gpu.visible and gpu.preset == spec.gpu.name)
    return Place(gpus=gpus or tuple(islice(like, spec.options.gpus)), machine=machine)

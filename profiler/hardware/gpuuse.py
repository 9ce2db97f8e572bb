"""Who is using which GPU of this machine, and how much: for choosing some of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath
from types import ModuleType
from typing import Any, NamedTuple

from msgspec import Struct

from llmtop.profiler.hardware.aside import OPEN_SECONDS, OneQuestion
from llmtop.profiler.hardware.nvml import NvmlReader

_MOST_COMMAND_WORDS = 4
_READING = OneQuestion()


class Process(NamedTuple):
    """What /proc says of a process."""

    user: str | None = None
    command: str | None = None


class GpuProcess(Struct, frozen=True, kw_only=True):
    """A process that holds memory of a GPU. None: not told, as of a process outside this container."""

    pid: int
    user: str | None = None
    command: str | None = None
    memory_bytes: int | None = None


class GpuUse(Struct, frozen=True, kw_only=True):
    """One GPU at this moment. None: the driver does not tell."""

    index: int
    """NVML's."""
    uuid: str | None
    preset: str
    """The name that a plan calls it by."""
    name: str | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization_percent: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    visible: bool = True
    """Whether CUDA shows it to what is started from here."""


class GpusInUse(Struct, frozen=True, kw_only=True):
    gpus: tuple[GpuUse, ...] = ()
    problem: str = ""
    """Why there are none."""
    is_silent: bool = False
    """Whether the driver hangs: there may be some, and nobody knows."""


def gpus_in_use(
    pynvml: ModuleType | Any | None = None, *, process_of: Callable[[int], Process] | None = None
) -> GpusInUse:
    """Every GPU with its processes, read now; a few milliseconds for each."""
    reader = NvmlReader(pynvml)
    if not reader.devices:
        return GpusInUse(problem=reader.problem or "", is_silent=reader.is_silent)
    silent = GpusInUse(problem="the driver of the GPUs does not answer", is_silent=True)
    return _READING.ask(lambda: _read(reader, process_of or look_up), silent, OPEN_SECONDS)


def _read(reader: NvmlReader, asked: Callable[[int], Process]) -> GpusInUse:
    from llmtop.profiler.hardware.machine import preset_name

    try:
        visible = reader.visible_indices()
        gpus = []
        for sample in reader.sample():
            device, holders = reader.devices[sample.index], reader.holders(sample.index)
            processes = None if holders is None else tuple(_process(asked, *holder) for holder in holders)
            gpus.append(
                GpuUse(
                    index=sample.index,
                    uuid=device.uuid,
                    preset=preset_name(device.name) if device.name else "unknown",
                    name=device.name,
                    memory_used_bytes=sample.memory_used_bytes,
                    memory_total_bytes=sample.memory_total_bytes,
                    utilization_percent=sample.utilization_percent,
                    processes=processes,
                    visible=sample.index in visible,
                )
            )
    finally:
        reader.close()
    return GpusInUse(gpus=tuple(gpus), problem=reader.problem or "")


def _process(asked: Callable[[int], Process], pid: int, memory_bytes: int | None) -> GpuProcess:
    found = asked(pid)
    return GpuProcess(pid=pid, user=found.user, command=found.command, memory_bytes=memory_bytes)


def look_up(pid: int) -> Process:
    """The owner and the first words of a process; nothing of one that has gone or may not be seen."""
    import psutil

    try:
        process = psutil.Process(pid)
        words = process.cmdline()[:_MOST_COMMAND_WORDS]
        words = [PurePath(words[0]).name, *words[1:]] if words else [process.name()]
        return Process(process.username(), " ".join(words))
    except psutil.Error:
        return Process()


def visible_devices(gpus: tuple[GpuUse, ...]) -> str:
    """CUDA_VISIBLE_DEVICES for some of them, by name: CUDA's numbers are not NVML's on mixed machines."""
    return ",".join(gpu.uuid if gpu.uuid is not None else str(gpu.index) for gpu in gpus)

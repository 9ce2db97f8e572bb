"""What this machine has, in the words of the GPU presets. Fast, and never by loading torch."""

from __future__ import annotations

import re
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from llmtop.presets.resolve import Machine
from llmtop.profiler.hardware.hostmemory import host_memory_bytes

if TYPE_CHECKING:
    from llmtop.profiler.hardware.nvml import NvmlDevice

UNKNOWN = "unknown"
"""A GPU that no driver names."""
_PRESETS: tuple[tuple[str, str], ...] = (
    (r"h200", "h200"),
    (r"h100-80gb-hbm3", "h100-80gb"),
    (r"b200", "b200"),
    (r"a100-sxm\d?-40gb", "a100-40gb"),
    (r"a100-sxm\d?-80gb", "a100-80gb"),
    (r"v100-(sxm\d|dgxs)-16gb", "v100-16gb"),
    (r"v100-(sxm\d|dgxs)-32gb(-ls)?", "v100-32gb"),
)
"""NVML's names, written as in `preset_name`, whose preset has another name.

Not those of PCIe cards: the presets describe SXM modules, with an NVLink that such cards lack.
"""


def torch_with_cuda() -> bool:
    """Whether the installed torch is a CUDA build, from its version and without importing it."""
    version = torch_version()
    return version is not None and not version.endswith("+cpu")


def torch_version() -> str | None:
    """Of the torch that is installed; None: there is none.

    As the folder beside the package says: to ask importlib takes longer than all the rest of a plan.
    """
    found = PathFinder.find_spec("torch")
    if found is None or found.origin is None:
        return None
    folders = sorted(Path(found.origin).parents[1].glob("torch-*.dist-info"))
    if folders:
        return folders[-1].name.removeprefix("torch-").removesuffix(".dist-info")
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def detect_machine(pynvml: ModuleType | Any | None = None, *, open_seconds: float | None = None) -> Machine:
    """The GPUs that CUDA would use here (those like the first), else this machine as CPU.

    Where the driver hangs, one GPU of an unknown kind: `driver_silent` says that nobody knows.
    `open_seconds`: how long it may take to open, as of `NvmlReader`.
    """
    from llmtop.profiler.hardware.nvml import NvmlReader  # nothing to load for a plan of a named GPU

    reader = NvmlReader(pynvml, open_seconds=open_seconds)
    try:
        visible = [reader.devices[index] for index in reader.visible_indices()]
        silent = reader.is_silent
    finally:
        reader.close()
    memory = host_memory_bytes()
    if not visible:
        return Machine(
            gpu=UNKNOWN if silent else "cpu",
            gpus=1,
            host_memory_bytes=memory,
            torch_with_cuda=torch_with_cuda(),
            driver_silent=silent,
        )
    first = visible[0]
    return Machine(
        gpu=_gpu_name(first),
        gpus=sum(device.name == first.name for device in visible),
        host_memory_bytes=memory,
        torch_with_cuda=torch_with_cuda(),
        gpu_memory_bytes=first.memory_total_bytes,
        compute_capability=first.compute_capability,
    )


def preset_name(nvml_name: str) -> str:
    """The preset for a device that NVML calls so; for one without a preset, its own name as a preset's."""
    slug = re.sub(r"[^a-z0-9]+", "-", nvml_name.lower()).strip("-")
    short = re.sub(r"^(nvidia-|tesla-|geforce-)+", "", slug)
    return next((preset for pattern, preset in _PRESETS if re.fullmatch(pattern, short)), short)


def _gpu_name(device: NvmlDevice) -> str:
    return preset_name(device.name) if device.name else UNKNOWN

"""What an offload to NVMe reads and writes in a step, and what that takes at a measured speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.sizes import sizes_of
from llmtop.profiler.memory.swapped import GRADIENT_BYTES, STATE_BYTES, kept_param_bytes
from llmtop.profiler.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from llmtop.profiler.record.events import NvmeMeasured

PARAM_PASSES = 2
"""Reads of each parameter in a micro-batch: for forward and for backward."""


class NvmeTraffic(Struct, frozen=True, kw_only=True):
    """Of all ranks of a host, in one optimizer step."""

    read_bytes: int
    write_bytes: int


def uses_nvme(spec: RunSpec) -> bool:
    return "nvme" in (spec.options.offload_optimizer, spec.options.offload_param)


def nvme_traffic(spec: RunSpec) -> NvmeTraffic:
    """An estimate (deepspeed 0.19.8 `zero/stage3.py`, `swap_tensor/partitioned_optimizer_swapper.py`).

    What stays in memory because it is smaller than a block is counted too.
    """
    options, sizes = spec.options, sizes_of(spec)
    read = write = 0
    if options.offload_optimizer == "nvme":
        # The states are read and written back, the gradients written and read.
        read += (STATE_BYTES + GRADIENT_BYTES) * sizes.shard
        write += (STATE_BYTES + GRADIENT_BYTES) * sizes.shard
    if options.offload_param == "nvme":
        # The first elements stay in host memory, beside their copy on the drive.
        weights = sizes.dtype_bytes * sizes.shard - kept_param_bytes(spec, sizes)
        frozen = -(-sizes.frozen_bytes // sizes.ranks)
        read += PARAM_PASSES * (weights + frozen) * options.grad_accum
        write += weights
    return NvmeTraffic(read_bytes=options.gpus * read, write_bytes=options.gpus * write)


def traffic_seconds(
    traffic: NvmeTraffic, read_bytes_per_second: float | None, write_bytes_per_second: float | None
) -> float | None:
    """One after the other, as DeepSpeed does it unless told to overlap them; None without a speed."""
    if not read_bytes_per_second or not write_bytes_per_second:
        return None
    return traffic.read_bytes / read_bytes_per_second + traffic.write_bytes / write_bytes_per_second


def nvme_words(measured: NvmeMeasured) -> str:
    """What the drive can do, and what that means for a step."""
    if measured.step_seconds is None:
        return f"{measured.path}: its speed could not be measured"
    cached = "" if measured.direct else ", through the page cache"
    return (
        f"{measured.path} reads {format_rate(measured.read_bytes_per_second)} and writes"
        f" {format_rate(measured.write_bytes_per_second)}{cached}: a step moves"
        f" {format_bytes(measured.step_read_bytes)} and {format_bytes(measured.step_write_bytes)},"
        f" which takes about {format_seconds(measured.step_seconds)}"
    )

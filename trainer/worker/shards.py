"""Writes a whole tensor's values into what this rank holds of it: all of it, or its ZeRO-3 shards.

How DeepSpeed 0.19.8 cuts a parameter (`zero/partition_parameters.py:_partition_param` and
`_partition_param_sec`): flat, in equal parts, the last one padded; with hpZ a second, larger part in
`ds_secondary_tensor`, cut among fewer ranks; with parameters on NVMe the part lies in a file, and
passes through one of the swapper's buffers. Nothing here talks to another rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_CHUNK_ELEMENTS = 1 << 23
"""Copied at once: a copy to a GPU in another type first makes a converted one of its piece in host memory."""


def write_values(parameter: torch.Tensor, values: torch.Tensor, on_bytes: Callable[[int], None]) -> None:
    """Fill a parameter or buffer from `values`, which may be mapped from a file: only what is needed is read.

    `on_bytes` is told how many bytes of `values` were read, piece by piece.
    """
    with torch.no_grad():
        if hasattr(parameter, "ds_id"):
            _write_shards(parameter, values.reshape(-1), on_bytes)
        elif parameter.is_contiguous():
            _copy(parameter.detach().view(-1), values.reshape(-1), on_bytes)
        else:
            parameter.detach().copy_(values)
            on_bytes(values.nbytes)


def shard_bytes(parameter: Any, stored_bytes: int) -> int:
    """What of a stored tensor this rank reads for its part."""
    parts = 1 if not hasattr(parameter, "ds_id") else int(parameter.ds_zero_partition_world_size)
    return stored_bytes // parts


def _write_shards(parameter: Any, flat: torch.Tensor, on_bytes: Callable[[int], None]) -> None:
    shard = parameter.ds_tensor
    if hasattr(shard, "ds_quant_scale"):
        raise RuntimeError(f"parameter {parameter.ds_id} is packed already: weights cannot go into it")
    swapper = parameter.nvme_swapper
    on_nvme = swapper is not None and shard.final_location is not None
    if on_nvme:
        # Its part is in a file and has no memory: borrow a buffer, fill it, and write the file again.
        shard.data = swapper.get_buffer(parameter, shard.ds_numel).data
    _write_part(shard, flat, int(parameter.ds_zero_partition_rank), on_bytes)
    if on_nvme:
        swapper.swap_out_and_release([parameter])
    if parameter.ds_secondary_tensor is not None:
        group_rank = torch.distributed.get_rank(parameter.ds_zero_param_process_group)
        _write_part(parameter.ds_secondary_tensor, flat, group_rank, on_bytes)


def _write_part(part: Any, flat: torch.Tensor, number: int, on_bytes: Callable[[int], None]) -> None:
    """Part `number` of `flat`; what lies behind its end is padding."""
    size = int(part.ds_numel)
    start = min(number * size, flat.numel())
    count = min(size, flat.numel() - start)
    _copy(part.narrow(0, 0, count), flat.narrow(0, start, count), on_bytes)
    part.narrow(0, count, size - count).zero_()


def _copy(target: torch.Tensor, source: torch.Tensor, on_bytes: Callable[[int], None]) -> None:
    for start in range(0, source.numel(), _CHUNK_ELEMENTS):
        piece = source[start : start + _CHUNK_ELEMENTS]
        target[start : start + _CHUNK_ELEMENTS].copy_(piece)
        on_bytes(piece.nbytes)

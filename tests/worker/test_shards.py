"""Values written into shards: the last part and its padding, hpZ's second part, parts that lie on a drive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmtop.trainer.worker import shards
from llmtop.trainer.worker.shards import shard_bytes, write_values


class Swapper:
    """Stands in for DeepSpeed's: one buffer, and what was written to the drive."""

    def __init__(self) -> None:
        self.written: dict[int, torch.Tensor] = {}

    def get_buffer(self, parameter: Any, numel: int) -> torch.Tensor:
        return torch.full((numel,), -1.0)

    def swap_out_and_release(self, parameters: list[Any]) -> None:
        for parameter in parameters:
            self.written[parameter.ds_id] = parameter.ds_tensor.data.clone()
            parameter.ds_tensor.data = torch.empty(1)


def part(numel: int, location: str | None = None) -> torch.Tensor:
    tensor: Any = torch.full((numel,), -1.0, dtype=torch.bfloat16)
    tensor.ds_numel, tensor.final_location = numel, location
    made: torch.Tensor = tensor
    return made


def parameter(numel: int, ranks: int, rank: int, **fields: Any) -> Any:
    """A parameter as zero.Init leaves it on one rank."""
    made = {
        "ds_id": 3,
        "ds_tensor": part(-(-numel // ranks)),
        "ds_zero_partition_rank": rank,
        "ds_zero_partition_world_size": ranks,
        "ds_secondary_tensor": None,
        "nvme_swapper": None,
    }
    return SimpleNamespace(**(made | fields))


@given(numel=st.integers(1, 60), ranks=st.integers(1, 9))
def test_the_parts_of_all_ranks_are_the_whole(numel: int, ranks: int) -> None:
    values = torch.arange(1.0, numel + 1)
    parts, read = [], 0

    def on_bytes(count: int) -> None:
        nonlocal read
        read += count

    for rank in range(ranks):
        held = parameter(numel, ranks, rank)
        write_values(held, values, on_bytes)
        parts.append(held.ds_tensor.float())
    whole = torch.cat(parts)
    assert torch.equal(whole[:numel], values)
    assert not whole[numel:].any(), "padding is zero"
    assert read == values.nbytes, "every byte is read once by all ranks together"


def test_long_tensors_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_CHUNK_ELEMENTS", 4)
    pieces: list[int] = []
    held = parameter(20, 2, 1)
    write_values(held, torch.arange(20.0).view(4, 5), pieces.append)
    assert pieces == [16, 16, 8]
    assert torch.equal(held.ds_tensor.float(), torch.arange(10.0, 20.0))
    target = torch.zeros(4, 5, dtype=torch.bfloat16)
    write_values(target, torch.arange(20.0).view(4, 5), pieces.append)
    assert torch.equal(target.float().view(-1), torch.arange(20.0))
    turned = torch.zeros(5, 4).t()
    write_values(turned, torch.arange(20.0).view(4, 5), pieces.append)
    assert torch.equal(turned, torch.arange(20.0).view(4, 5))


def test_the_second_part_of_hpz(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks in two groups: each group holds the whole once more."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group)
    values = torch.arange(10.0)
    seconds = []
    for rank in range(4):
        held = parameter(10, 4, rank, ds_secondary_tensor=part(6), ds_zero_param_process_group=rank % 2)
        write_values(held, values, lambda _count: None)
        seconds.append(held.ds_secondary_tensor.float())
    for group in (seconds[:2], seconds[2:]):
        assert torch.equal(torch.cat(group)[:10], values)


def test_a_part_on_a_drive_is_written_there() -> None:
    swapper = Swapper()
    held = parameter(5, 2, 1, ds_tensor=part(3, "nvme"), nvme_swapper=swapper)
    write_values(held, torch.arange(5.0), lambda _count: None)
    assert torch.equal(swapper.written[3], torch.tensor([3.0, 4.0, 0.0]))
    small = parameter(5, 2, 0, nvme_swapper=swapper)
    write_values(small, torch.arange(5.0), lambda _count: None)
    assert torch.equal(small.ds_tensor.float(), torch.tensor([0.0, 1.0, 2.0])), "too small for the drive"


def test_packed_parts_are_refused_rather_than_filled_with_nonsense() -> None:
    held = parameter(4, 1, 0)
    held.ds_tensor.ds_quant_scale = torch.ones(1)
    with pytest.raises(RuntimeError, match="packed"):
        write_values(held, torch.ones(4), lambda _count: None)


def test_what_a_rank_reads() -> None:
    assert shard_bytes(parameter(8, 4, 0), 32) == 8
    assert shard_bytes(torch.zeros(8), 32) == 32

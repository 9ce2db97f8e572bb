"""Files that go from one host to another through the ranks: what cannot be read stops nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed

from llmtop.trainer.worker.state.apart import Domains, Source, hand_out


def test_a_file_that_is_not_there_is_told_when_all_have_taken_part(tmp_path: Path) -> None:
    source = Source(tmp_path / "gone")
    assert source.size_bytes == 0
    with pytest.raises(FileNotFoundError):
        source.close()


def test_a_file_that_becomes_shorter_is_read_to_the_length_that_was_promised(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"abcdef")
    source = Source(path)
    path.write_bytes(b"ab")
    assert source.size_bytes == 6 and source.read(6) == b"ab\0\0\0\0" and source.read(2) == b"\0\0"
    with pytest.raises(OSError, match="become shorter"):
        source.close()


def test_the_rank_that_has_the_file_says_that_it_cannot_be_read(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        (tmp_path / "there").write_bytes(b"x" * 100)
        device = torch.device("cpu")
        told = hand_out(tmp_path, [("there", 0)], Domains((0,)), device, durable=False)
        assert told is None
        told = hand_out(tmp_path, [("gone", 0), ("there", 0)], Domains((0,)), device, durable=False)
        assert told is not None and "rank 0 could not read" in told and "gone" in told
    finally:
        torch.distributed.destroy_process_group()

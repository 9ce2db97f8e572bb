"""What a run goes on from after a power cut has reached the drive before anybody is told of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest

from llmtop.trainer.statefile import MARKER, Position, Progress, Source, StateIndex, read_progress
from llmtop.trainer.worker import checkpoint, tokens
from llmtop.trainer.worker.tokenizer import ByteTokenizer
from tests.recorded_spec import recorded_spec

Deeds = list[tuple[str, str]]


@pytest.fixture
def deeds(monkeypatch: pytest.MonkeyPatch) -> Deeds:
    """What was synced and what was given another name, in order."""
    done: Deeds = []
    sync, rename, replace = os.fsync, Path.rename, Path.replace

    def noted_sync(descriptor: int) -> None:
        done.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        sync(descriptor)

    def noted_rename(path: Path, target: Any) -> Path:
        done.append(("name", Path(target).name))
        return rename(path, target)

    def noted_replace(path: Path, target: Any) -> Path:
        done.append(("name", Path(target).name))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    monkeypatch.setattr(Path, "replace", noted_replace)
    return done


@pytest.mark.parametrize("durable", [True, False])
def test_a_checkpoint_has_its_name_on_the_drive_when_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deeds: Deeds, durable: bool
) -> None:
    source = Source(zero=2, world_size=1, engine_optimizer="x", optimizer="x")
    index = StateIndex(step=4, source=source, parameters=())
    monkeypatch.setattr(checkpoint, "make_index", lambda *_, **__: index)
    partial = tmp_path / "checkpoints" / ".step-4.partial"
    partial.mkdir(parents=True)
    progress = Progress(step=4, position=Position(), world_size=1)
    assert checkpoint._describe(None, partial, progress, only_trainable=False) is None
    assert checkpoint._put_in_place(partial, 4, durable=durable) is None
    assert read_progress(tmp_path / "checkpoints" / "step-4") is not None
    named = deeds.index(("name", "step-4"))
    assert deeds.index(("name", MARKER)) < named
    assert (deeds[named + 1 :] == [("sync", "checkpoints")]) == durable


def test_token_ids_are_on_the_drive_before_they_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deeds: Deeds
) -> None:
    monkeypatch.setattr(tokens, "_encoded", lambda *_: iter([numpy.array([1, 2, 3])]))
    monkeypatch.setattr(tokens, "read_pieces", lambda *_: iter(()))
    path = tmp_path / "tokens" / "ids.uint16"
    tokens._write_tokens(path, numpy.dtype(numpy.uint16), recorded_spec("cpu", ranks=1), ByteTokenizer(300))
    assert path.stat().st_size == 6
    assert [what for what, _ in deeds] == ["sync", "name", "sync"]
    assert deeds[0][1].endswith(".new") and deeds[2] == ("sync", "tokens")

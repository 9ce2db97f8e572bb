"""Inputs of a hundred megabytes for every reader of files: refused, or read in bounded time and memory."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from benchmarks.fuzzing.making import Maker
from benchmarks.fuzzing.target import Target
from llmtop.presets import catalog
from llmtop.presets.weightfiles import safetensors_files, stored_tensors
from llmtop.profiler.export.importing import import_run
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control, statefile
from llmtop.trainer.dsimport.read import import_config
from llmtop.trainer.hosts.hostfile import read_hostfile

SIZE_BYTES = 100_000_000
_NAME = "input"
_CONTENTS: tuple[tuple[bytes, bytes], ...] = (
    (b"", b"\0"),
    (b"", b"["),
    (b"", b'{"a":'),
    (b"", b"1"),
    (b'{"a": "', b"x"),
    (b"[", b"1,"),
    (b"# ", b"comment\n# "),
    (b"", b"a = 1\n"),
    (b"", b" "),
    (b"PK\x05\x06", b"PK\x01\x02"),
    (struct.pack("<Q", SIZE_BYTES - 1000), b'{"a":['),
    (struct.pack("<Q", SIZE_BYTES - 1000) + b"{", b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'),
)
"""How a file begins, and what it goes on with."""


def _make(name: str) -> Callable[[Maker, Path], None]:
    def make(maker: Maker, folder: Path) -> None:
        head, part = maker.draw.choice(_CONTENTS)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((head + part * (SIZE_BYTES // len(part)))[:SIZE_BYTES])

    return make


def _events(folder: Path) -> None:
    tail = EventTail(folder / "rank-0.jsonl")
    while tail.poll(1 << 20) or tail.behind:
        pass


def _requests(folder: Path) -> None:
    assert all(isinstance(asked, control.NotARequest) for asked in control.read_requests(RunDir(folder)))


def _weights(folder: Path) -> None:
    stored_tensors(safetensors_files(folder))


TARGETS = tuple(
    Target(name=f"100 MB as {name}", make=_make(name), act=act)
    for name, act in (
        ("recipe.toml", lambda folder: catalog.load_recipe(str(folder / "recipe.toml"))),
        ("config.json", lambda folder: catalog.load_model(str(folder / "config.json"))),
        ("ds.json", lambda folder: import_config(folder / "ds.json")),
        ("hostfile", lambda folder: read_hostfile(folder / "hostfile")),
        ("model.safetensors", _weights),
        ("run.zip", lambda folder: import_run(folder / "run.zip", folder / "runs")),
        ("run/spec.json", lambda folder: RunDir.open(folder / "run")),
        ("control/1.json", _requests),
        ("step-3/llmtop.json", lambda folder: statefile.newest(folder)),
        ("step-3/index.json", lambda folder: statefile.read_index(folder / "step-3")),
        ("rank-0.jsonl", _events),
    )
)

"""What is loaded ahead of time, and the checks that keep a parent of forks away from CUDA."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import preload
from benchmarks.forkserver import left_after
from llmtop.trainer.worker import forking


class FakeMaps:
    """Stands for /proc/self/maps: which libraries are mapped."""

    def __init__(self, maps: str) -> None:
        self.maps = maps

    def __call__(self, path: str) -> Any:
        return SimpleNamespace(read_text=lambda: self.maps)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize(
    ("maps", "answer", "touched"),
    [
        ("/lib/libnvidia-ml.so.580", 0, ""),
        ("/lib/libcuda.so.1", 3, ""),
        ("/lib/libcuda.so.1", 0, "cuInit has been called"),
    ],
    ids=["NVML alone", "the driver loaded", "the driver initialized"],
)
def test_what_counts_as_touching_cuda(
    monkeypatch: pytest.MonkeyPatch, maps: str, answer: int, touched: str
) -> None:
    monkeypatch.setattr(forking, "Path", FakeMaps(maps))
    library = SimpleNamespace(cuDeviceGetCount=lambda count: answer)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert forking.cuda_touched() == touched


def test_torch_says_whether_it_has_initialized_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert forking.cuda_touched() == "torch has initialized CUDA"


def test_nvml_is_given_up_as_often_as_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [0, 0, 1]
    monkeypatch.setattr(forking, "Path", FakeMaps("/lib/libnvidia-ml.so.580"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(nvmlShutdown=lambda: left.pop(0)))
    forking.forget_nvml()
    assert left == []


class Imports:
    """Stands for importing: what was loaded, how long it took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, each_seconds: float = 0.0) -> None:
        self.loaded: list[str] = []
        self.now = 0.0
        self._each = each_seconds
        names = ("json", "csv", "csv.part", "not_installed_anywhere", "wave")
        monkeypatch.setattr(preload, "PRELOADED", names)
        monkeypatch.setattr(importlib, "import_module", self._load)
        monkeypatch.setattr(preload, "cuda_touched", lambda: "cuInit was called" * ("csv" in self.loaded))

    def _load(self, name: str) -> None:
        self.loaded.append(name)
        self.now += self._each

    def load(self, *leave: str) -> preload.Preloaded:
        return preload.preload(frozenset(leave), 60.0, lambda: self.now)


def test_a_module_that_touches_cuda_is_named_and_later_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = Imports(monkeypatch, each_seconds=2)
    spoilt = imports.load()
    assert spoilt.touched == "csv"
    assert spoilt.words == "4.0 s (json 2.0 s, csv 2.0 s, then cuInit was called by csv)"
    imports.loaded.clear()
    fine = imports.load("csv")
    assert (fine.touched, fine.words) == ("", "4.0 s (json 2.0 s, wave 2.0 s), left to the ranks: csv")
    assert imports.loaded == ["json", "wave"]


def test_loading_that_takes_too_long_goes_on_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = Imports(monkeypatch, each_seconds=61)
    slow = imports.load("csv")
    assert imports.loaded == ["json"]
    assert slow.words == "61.0 s (json 61.0 s), left to the ranks: csv, wave"


def test_the_second_restart_loads_only_what_is_known_to_be_clean() -> None:
    names = list(preload.PRELOADED)
    assert left_after("peft", 1) == ["peft"]
    assert left_after("peft", 2) == names[names.index("peft") :]


@pytest.mark.slow
def test_what_is_left_to_the_ranks_is_not_loaded_by_what_is_preloaded() -> None:
    """In a process of its own: the real imports, without those that ask the device."""
    code = (
        "import sys; from benchmarks import preload\n"
        "from llmtop.trainer.change.standby import TOUCHES_CUDA as left\n"
        "preload.preload(frozenset(left))\n"
        "print([name for name in left if name in sys.modules], 'deepspeed' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_WARM_POOL": "0"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["[] True"], done.stderr

"""The checks that keep a parent of forks away from CUDA."""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import zygote


class FakeLink:
    def __init__(self, target: str) -> None:
        self._target = target

    def readlink(self) -> Any:
        return SimpleNamespace(name=self._target)


class FakeMaps:
    """Stands for /proc/self: which libraries are mapped and which devices are open."""

    def __init__(self, maps: str, devices: tuple[str, ...] = ()) -> None:
        self.maps, self.devices = maps, devices

    def __call__(self, path: str) -> Any:
        if path.endswith("fd"):
            links = [FakeLink(name) for name in self.devices]
            return SimpleNamespace(iterdir=lambda: iter(links))
        return SimpleNamespace(read_text=lambda: self.maps)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize(
    ("maps", "devices", "answer", "touched"),
    [
        ("", ("nvidiactl", "nvidia0"), 0, ""),
        ("", ("nvidia-uvm",), 0, "is open"),
        ("/lib/libcuda.so.1", (), 3, ""),
        ("/lib/libcuda.so.1", (), 0, "cuInit has been called"),
    ],
    ids=["NVML alone", "a context's device", "the driver loaded", "the driver initialized"],
)
def test_what_counts_as_touching_cuda(
    monkeypatch: pytest.MonkeyPatch, maps: str, devices: tuple[str, ...], answer: int, touched: str
) -> None:
    monkeypatch.setattr(zygote, "Path", FakeMaps(maps, devices))
    library = SimpleNamespace(cuDeviceGetCount=lambda count: answer)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert touched in zygote.cuda_touched() and bool(zygote.cuda_touched()) == bool(touched)


def test_nvml_is_given_up_as_often_as_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [0, 0, 1]
    monkeypatch.setattr(zygote, "Path", FakeMaps("/lib/libnvidia-ml.so.580"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(nvmlShutdown=lambda: left.pop(0)))
    zygote.forget_nvml()
    assert left == []


def test_a_module_that_touches_cuda_is_named_and_later_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(zygote, "PRELOADED", ("json", "csv", "csv.part", "not_installed_anywhere", "wave"))
    monkeypatch.setattr(importlib, "import_module", loaded.append)
    monkeypatch.setattr(zygote, "cuda_touched", lambda: "cuInit" if "csv" in loaded else "")
    assert zygote.preload(frozenset()) == "csv"
    loaded.clear()
    assert zygote.preload(frozenset({"csv"})) == ""
    assert loaded == ["json", "wave"]

"""`doctor` on the tools that ops are built with, against tools made for the purpose."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmtop.trainer import toolchain
from llmtop.tui.doctor import software
from llmtop.tui.doctor.check import Check, Machine

H200 = Machine(
    torch_version="2.11.0",
    torch_cuda="13.0",
    gpu_names=("NVIDIA H200",),
    driver_version="580.65",
    driver_cuda=(13, 0),
)


def tool(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def gcc(path: Path, major: int) -> None:
    tool(path, f'[ "$1" = -dumpversion ] && echo {major} || echo "{path.name} (Debian) {major}.2.0"')


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    tool(tmp_path / "cuda" / "bin" / "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.1'")
    gcc(folder / "c++", 13)
    tool(folder / "ninja", "echo 1.13")
    for name in ("CC", "CXX", "CUDA_PATH", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    return folder


def look() -> dict[str, Check]:
    return {check.name: check for check in software.software_checks(H200)}


def test_a_machine_with_all_tools(bin_folder: Path) -> None:
    checks = look()
    for name in ("nvcc", "c++ compiler", "ninja", "compiled ops", "triton cache"):
        assert checks[name].status == "ok", checks[name]
    assert "none built yet" in checks["compiled ops"].found


def test_ninja_beside_the_interpreter_is_enough(bin_folder: Path, tmp_path: Path) -> None:
    (bin_folder / "ninja").unlink()
    assert look()["ninja"].status == "missing"
    tool(tmp_path / "venv" / "bin" / "ninja", "echo 1.13")
    check = look()["ninja"]
    assert check.status == "ok" and str(tmp_path / "venv" / "bin") in check.found


def test_a_gcc_that_nvcc_does_not_take(bin_folder: Path) -> None:
    gcc(bin_folder / "c++", 16)
    check = look()["c++ compiler"]
    assert check.status == "warn" and "CXX=g++-15" in check.mend
    gcc(bin_folder / "g++-15", 15)
    gcc(bin_folder / "gcc-15", 15)
    check = look()["c++ compiler"]
    assert check.status == "ok" and "ranks will use g++-15" in check.found


def test_another_toolkit_that_ranks_will_use(
    bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path / "cuda" / "bin" / "nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.1'")
    monkeypatch.setattr(software, "other_toolkit", lambda _environment, _version: None)
    assert "CUDA 13.0 toolkit" in look()["nvcc"].mend
    other = toolchain.Toolkit(home="/usr/local/cuda-13.0", release=(13, 0), chosen=False)
    monkeypatch.setattr(software, "other_toolkit", lambda _environment, _version: other)
    check = look()["nvcc"]
    assert check.status == "warn" and "CUDA_HOME=/usr/local/cuda-13.0" in check.mend, "the user chose one"
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(software, "toolkit", lambda _environment: None)
    check = look()["nvcc"]
    assert check.status == "ok" and "ranks will use" in check.found


def test_folders_that_cannot_be_written(
    bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "ops"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton"))
    checks = look()
    assert checks["compiled ops"].status == "missing"
    assert "TORCH_EXTENSIONS_DIR" in checks["compiled ops"].mend
    assert checks["triton cache"].status == "warn"

"""What ops are built with: found, put right, or refused, against tools made for the purpose."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtop.presets.errors import UsageError
from llmtop.profiler.hardware.libaio import libaio, libaio_folders
from llmtop.trainer import toolchain
from llmtop.trainer.dsconfig import deepspeed_config
from llmtop.trainer.folders import why_not_writable
from llmtop.trainer.ops import ASYNC_IO, CPU_ADAM, FUSED_ADAM, PIN_MEMORY, Op, ops_of
from llmtop.trainer.supervisor.rankenv import deepspeed_archs
from llmtop.trainer.toolchain import build_problem, compiler_problem, gcc_below, mended
from tests.recorded_spec import recorded_spec


class Machine:
    """A PATH of fake tools, a folder of toolkits, and a home."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.toolkits, self.home = (folder / name for name in ("bin", "toolkits", "home"))
        for made in (self.bin, self.toolkits, self.home):
            made.mkdir()
        self.environment = {"PATH": str(self.bin), "HOME": str(self.home)}

    def tool(self, path: Path, script: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def nvcc(self, toolkit: str, release: str) -> Path:
        home = self.toolkits / toolkit
        self.tool(home / "bin" / "nvcc", f"echo 'Cuda compilation tools, release {release}, V{release}.1'")
        return home

    def gcc(self, name: str, major: int) -> None:
        answer = f'[ "$1" = -dumpversion ] && echo {major} || echo "{name} (Debian) {major}.2.0"'
        self.tool(self.bin / name, answer)

    def mended(self, cuda: str | None = "13.0") -> dict[str, str]:
        return mended(self.environment, cuda, root=self.toolkits)

    def problem(self, *ops: Op, cuda: str | None = "13.0") -> UsageError | None:
        return build_problem(ops, self.mended(cuda), cuda, root=self.toolkits)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One that can build everything."""
    made = Machine(tmp_path)
    made.nvcc("cuda", "13.0")
    made.gcc("c++", 13)
    made.tool(made.bin / "ninja", "echo 1.13")
    monkeypatch.setattr(toolchain, "_prebuilt", lambda _op: False)
    # A ninja beside this interpreter is not the fake machine's.
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    return made


def test_a_whole_machine_has_no_problem_and_nothing_is_changed(machine: Machine) -> None:
    assert machine.mended() == machine.environment
    assert machine.problem(FUSED_ADAM, CPU_ADAM, PIN_MEMORY, ASYNC_IO) is None


def test_ninja_beside_the_interpreter_is_put_on_the_path(machine: Machine, tmp_path: Path) -> None:
    (machine.bin / "ninja").unlink()
    missing = machine.problem(CPU_ADAM, cuda=None)
    assert missing is not None and "ninja" in missing.what and missing.fix.startswith("pip install ninja")
    machine.tool(tmp_path / "venv" / "bin" / "ninja", "echo 1.13")
    assert machine.mended()["PATH"].split(os.pathsep)[-1] == str(tmp_path / "venv" / "bin")
    assert machine.problem(CPU_ADAM, cuda=None) is None


def test_without_nvcc_the_toolkit_is_named(machine: Machine) -> None:
    (machine.toolkits / "cuda" / "bin" / "nvcc").unlink()
    problem = machine.problem(FUSED_ADAM)
    assert problem is not None
    assert "no nvcc" in problem.what
    assert "CUDA 13.0 toolkit" in problem.fix and "adamw_torch" in problem.fix
    assert machine.problem(CPU_ADAM) is None, "CPU Adam is plain C++"
    assert machine.problem(FUSED_ADAM, cuda=None) is None, "a CPU build of torch compiles without it"


def test_nvcc_is_asked_once_in_an_environment_and_in_that_environment(machine: Machine) -> None:
    nvcc, asked = machine.toolkits / "cuda" / "bin" / "nvcc", machine.home / "asked"
    machine.tool(nvcc, f'echo >> {asked}; echo "release $SAID, V$SAID"')
    machine.environment["SAID"] = "13.0"
    assert machine.problem(FUSED_ADAM) is None
    assert asked.read_text() == "\n"
    machine.environment["SAID"] = "12.4"
    problem = machine.problem(FUSED_ADAM)
    assert problem is not None and "is CUDA 12.4" in problem.what


def test_a_toolkit_of_another_major_version(machine: Machine) -> None:
    machine.nvcc("cuda", "12.4")
    problem = machine.problem(FUSED_ADAM)
    assert problem is not None
    assert "is CUDA 12.4" in problem.what and "CUDA 13.0" in problem.why
    for name, release in (("cuda-12.8", "12.8"), ("cuda-13.1", "13.1")):
        machine.nvcc(name, release)
    assert machine.mended()["CUDA_HOME"] == str(machine.toolkits / "cuda-13.1")
    machine.nvcc("cuda-13.0", "13.0")
    assert machine.mended()["CUDA_HOME"] == str(machine.toolkits / "cuda-13.0"), "torch's own is better"
    assert machine.problem(FUSED_ADAM) is None


def test_a_toolkit_that_the_user_chose_stays(machine: Machine) -> None:
    machine.nvcc("cuda-13.0", "13.0")
    machine.environment["CUDA_HOME"] = str(machine.nvcc("own", "12.4"))
    assert machine.mended()["CUDA_HOME"] == machine.environment["CUDA_HOME"]
    problem = machine.problem(FUSED_ADAM)
    assert problem is not None and str(machine.toolkits / "own") in problem.what


def test_a_gcc_that_is_too_new_for_nvcc(machine: Machine) -> None:
    machine.gcc("c++", 16)
    problem = machine.problem(FUSED_ADAM)
    assert problem is not None
    assert "gcc 16" in problem.what and "CXX=g++-15" in problem.fix
    assert machine.problem(CPU_ADAM) is None, "nvcc does not compile it"
    machine.gcc("g++-14", 14)
    assert "CXX" not in machine.mended(), "nvcc needs the C compiler of the same release"
    machine.gcc("gcc-14", 14)
    assert (machine.mended()["CC"], machine.mended()["CXX"]) == ("gcc-14", "g++-14")
    assert machine.problem(FUSED_ADAM) is None
    machine.environment["CXX"] = "c++"
    assert "CC" not in machine.mended()


@pytest.mark.parametrize(
    ("cuda", "bound"),
    [((12, 1), 13), ((12, 6), 14), ((13, 0), 16), ((13, 1), None), ((10, 2), None), (None, None)],
)
def test_the_newest_gcc_of_each_cuda(cuda: tuple[int, int] | None, bound: int | None) -> None:
    assert gcc_below(cuda) == bound


def test_no_compiler(machine: Machine) -> None:
    (machine.bin / "c++").unlink()
    problem = machine.problem(CPU_ADAM)
    assert problem is not None and "c++ does not run" in problem.what and "install g++" in problem.fix
    triton = compiler_problem("liger = true needs one", machine.environment)
    assert triton is not None and "no C compiler" in triton.what
    machine.gcc("gcc", 13)
    assert compiler_problem("liger = true needs one", machine.environment) is None


def test_what_is_built_needs_no_compiler(machine: Machine) -> None:
    (machine.bin / "c++").unlink()
    machine.environment["TORCH_EXTENSIONS_DIR"] = str(machine.home / "ops")
    built = machine.home / "ops" / "cpu_adam" / "cpu_adam.so"
    built.parent.mkdir(parents=True)
    built.touch()
    assert machine.problem(CPU_ADAM) is None
    assert machine.problem(CPU_ADAM, FUSED_ADAM) is not None


def test_an_extensions_folder_that_cannot_be_made(machine: Machine) -> None:
    (machine.home / "file").touch()
    machine.environment["TORCH_EXTENSIONS_DIR"] = str(machine.home / "file" / "ops")
    problem = machine.problem(CPU_ADAM)
    assert problem is not None
    assert "cannot be written" in problem.what and "TORCH_EXTENSIONS_DIR" in problem.fix


def test_a_triton_cache_that_cannot_be_written_is_moved(machine: Machine) -> None:
    (machine.home / ".triton").touch()
    moved = machine.mended()["TRITON_CACHE_DIR"]
    assert why_not_writable(Path(moved)) is None
    assert "TRITON_CACHE_DIR" not in machine.mended(cuda=None), "nothing compiles with Triton on the CPU"
    machine.environment["TRITON_CACHE_DIR"] = str(machine.home / ".triton" / "own")
    assert machine.mended()["TRITON_CACHE_DIR"] == machine.environment["TRITON_CACHE_DIR"]


def test_libaio_in_a_prefix_is_found_by_compiler_linker_and_loader(tmp_path: Path) -> None:
    header, library = tmp_path / "include" / "libaio.h", tmp_path / "lib" / "libaio.so"
    for file in (header, library):
        file.parent.mkdir()
        file.touch()
    flags = {"CFLAGS": f"-O2 -I{header.parent}", "LDFLAGS": f"-L {library.parent}"}
    assert libaio(flags) is not None
    places = {"CPATH": str(header.parent), "LIBRARY_PATH": str(library.parent)}
    assert libaio_folders(flags) == {**places, "LD_LIBRARY_PATH": str(library.parent)}
    assert libaio_folders({**flags, **places, "LD_LIBRARY_PATH": f"/x:{library.parent}"}) == {}
    assert libaio_folders({"CFLAGS": "-I'", "LDFLAGS": "-L"}) == {}


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("9.0a", "9.0"),
        ("8.0 9.0a+PTX", "8.0;9.0+PTX"),
        ("Hopper", "9.0"),
        ("Ampere;Hopper+PTX", "8.0;8.6;9.0+PTX"),
        ("native", ""),
        ("9", ""),
        ("10.0f,12.0", "10.0;12.0"),
    ],
)
def test_arch_lists_become_what_deepspeed_reads(given: str, made: str) -> None:
    assert deepspeed_archs(given) == made


def ops(kind: Any = "h200", **options: Any) -> tuple[str, ...]:
    return tuple(op.name for op in ops_of(deepspeed_config(recorded_spec(kind, **options))))


def test_the_ops_of_a_run() -> None:
    assert ops() == ("fused_adam",)
    assert ops(optimizer="adamw_torch") == ops(optimizer="adamw_8bit") == ()
    assert ops(offload_optimizer="cpu") == ("cpu_adam",)
    nvme = {"zero": 3, "nvme_path": "/x", "offload_optimizer": "nvme"}
    assert ops(**nvme) == ("pin_memory", "async_io", "cpu_adam")
    quantized = {"zero_optimization": {"zero_quantized_weights": True}}
    assert ops(zero=3, deepspeed=quantized) == ("quantizer", "fused_adam")
    assert ops("cpu") == ()


def test_a_link_that_leads_nowhere_is_no_folder_to_be_made(tmp_path: Path) -> None:
    """Making folders fails there, although the folder above can be written."""
    link = tmp_path / "drive"
    link.symlink_to("unmounted")
    for folder in (link, link / "swap"):
        assert "unmounted, which does not exist" in (why_not_writable(folder) or "")
    (tmp_path / "unmounted").mkdir()
    assert why_not_writable(link / "swap") is None

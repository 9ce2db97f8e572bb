"""Checks of the software: Python, packages, torch against driver and nvcc, the compiler.

Nothing here imports torch or its family: versions come from package metadata and from files, the
rest from NVML and the tools' own version flags.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from llmtop.tui.doctor.check import Check, Machine, Status, installed_version, output_of


class PackageRow(Struct, frozen=True):
    """A package that llmtop uses when it is there."""

    name: str
    use: str
    extra: str
    """The extra that brings it; empty for one that no extra can bring."""
    oldest: tuple[int, ...] = ()
    below: tuple[int, ...] = ()


PACKAGES: tuple[PackageRow, ...] = (
    PackageRow("torch", "training", "train", (2, 4)),
    PackageRow("deepspeed", "training", "train", (0, 19, 8), (0, 20)),
    PackageRow("transformers", "training", "train", (5, 17), (6,)),
    PackageRow("tokenizers", "training", "train", (0, 22)),
    PackageRow("safetensors", "training", "train", (0, 6)),
    PackageRow("flash-attn", "--attention flash_attention_2", ""),
    PackageRow("liger-kernel", "--liger", "kernels", (0, 8, 5)),
    PackageRow("bitsandbytes", "8-bit optimizers and --quantization", "kernels", (0, 50)),
    PackageRow("peft", "--lora-rank", "kernels", (0, 21)),
    PackageRow("datasets", "saved datasets folders as --data", "data", (4,)),
)


def look_at_machine() -> Machine:
    torch_version = installed_version("torch")
    names, driver, cuda = _nvml()
    return Machine(
        torch_version=torch_version,
        torch_cuda=_torch_cuda() if torch_version else None,
        gpu_names=names,
        driver_version=driver,
        driver_cuda=cuda,
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _torch_cuda() -> str | None:
    """torch.version.cuda read from its file: importing torch would take seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None


def _nvml() -> tuple[tuple[str, ...], str | None, tuple[int, int] | None]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), None, None
    try:
        count = pynvml.nvmlDeviceGetCount()
        names = tuple(
            str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in range(count)
        )
        number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        return names, str(pynvml.nvmlSystemGetDriverVersion()), (number // 1000, number % 1000 // 10)
    except pynvml.NVMLError:
        return (), None, None
    finally:
        pynvml.nvmlShutdown()


def _python(_machine: Machine) -> Check:
    found = f"{sys.version.split()[0]} in {sys.prefix}"
    return Check(name="python", status="ok", found=found)


def _package(row: PackageRow, machine: Machine) -> Check:
    version = installed_version(row.name)
    # Without a driver a CUDA build of torch is gigabytes for nothing.
    held = "" if machine.driver_version or row.extra != "train" else "-c constraints-cpu.txt "
    mend = f"pip install {held}-e '.[{row.extra}]' in the clone"
    if not row.extra:
        mend = f"pip install --no-build-isolation {row.name}, after torch, where nvcc is; sdpa does without"
    if version is None:
        status: Status = "missing" if row.extra == "train" else "optional"
        return Check(name=row.name, status=status, found=f"not installed; for {row.use}", mend=mend)
    release = _release(version)
    if (row.oldest and release < row.oldest) or (row.below and release >= row.below):
        wanted = f">={'.'.join(map(str, row.oldest))}"
        if row.below:
            wanted += f",<{'.'.join(map(str, row.below))}"
        return Check(
            name=row.name, status="warn", found=f"{version}; tested with {row.name}{wanted}", mend=mend
        )
    return Check(name=row.name, status="ok", found=version)


def _driver(machine: Machine) -> Check:
    if machine.driver_version is None:
        return Check(
            name="gpu",
            status="optional",
            found="no NVIDIA driver answers; only --gpu cpu can train here",
            mend="none needed to plan or to watch; to train on GPUs install the NVIDIA driver",
        )
    counted = ", ".join(f"{machine.gpu_names.count(n)} x {n}" for n in dict.fromkeys(machine.gpu_names))
    cuda = ".".join(map(str, machine.driver_cuda or ()))
    found = f"{counted or 'no GPU'}; driver {machine.driver_version}, CUDA up to {cuda}"
    return Check(name="gpu", status="ok" if machine.gpu_names else "warn", found=found)


def _torch_build(machine: Machine) -> Check:
    """Whether torch's CUDA fits the driver."""
    name = "torch cuda"
    if machine.torch_version is None:
        return Check(name=name, status="missing", found="torch is not installed", mend="see torch")
    if machine.torch_cuda is None:
        if not machine.gpu_names:
            return Check(name=name, status="ok", found="a CPU build, as this machine needs")
        return Check(
            name=name,
            status="warn",
            found=f"torch {machine.torch_version} is a CPU build, and there is a GPU",
            mend="pip install --force-reinstall torch, without constraints-cpu.txt",
        )
    if machine.driver_cuda is not None and _release(machine.torch_cuda)[0] > machine.driver_cuda[0]:
        newest = ".".join(map(str, machine.driver_cuda))
        return Check(
            name=name,
            status="warn",
            found=f"torch is built for CUDA {machine.torch_cuda}, the driver runs up to {newest}",
            mend=f"a newer driver, or a torch built for CUDA {machine.driver_cuda[0]}",
        )
    return Check(name=name, status="ok", found=f"CUDA {machine.torch_cuda}")


def _nvcc(machine: Machine) -> Check:
    """DeepSpeed compiles its CUDA ops on first use and refuses an nvcc of another major version."""
    version = _nvcc_version()
    if machine.torch_cuda is None:
        found = f"{version or 'none'}; not needed without a CUDA build of torch"
        return Check(name="nvcc", status="ok", found=found)
    if version is None:
        return Check(
            name="nvcc",
            status="missing",
            found="DeepSpeed's fused Adam is compiled with it on first use",
            mend=f"install the CUDA {machine.torch_cuda} toolkit, set CUDA_HOME; or --optimizer adamw_torch",
        )
    wanted = _release(machine.torch_cuda)[0]
    if _release(version)[0] != wanted:
        return Check(
            name="nvcc",
            status="warn",
            found=f"{version}; torch is built for CUDA {machine.torch_cuda}: DeepSpeed refuses to compile",
            mend=f"point CUDA_HOME to a CUDA {wanted} toolkit; or --optimizer adamw_torch",
        )
    return Check(name="nvcc", status="ok", found=version)


def _nvcc_version() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    text = output_of([path, "--version"])
    match = re.search(r"release (\d+\.\d+)", text or "")
    return match.group(1) if match else None


def _compiler(_machine: Machine) -> Check:
    command = os.environ.get("CXX") or "c++"
    text = output_of([command, "--version"])
    if text is None:
        return Check(
            name="c++ compiler",
            status="missing",
            found=f"{command} does not run; DeepSpeed's ops and CPU Adam are compiled on first use",
            mend="install g++ (Debian: apt install g++)",
        )
    return Check(name="c++ compiler", status="ok", found=text.splitlines()[0])


def _python_headers(_machine: Machine) -> Check:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if header.exists():
        return Check(name="python headers", status="ok", found=str(header))
    return Check(
        name="python headers",
        status="missing",
        found=f"{header} is not there; DeepSpeed's ops need it to compile",
        mend="install Python's development files (Debian: apt install python3-dev)",
    )


def _ninja(_machine: Machine) -> Check:
    found = installed_version("ninja")
    path = shutil.which("ninja")
    if found or path:
        return Check(name="ninja", status="ok", found=found or str(path))
    return Check(
        name="ninja",
        status="missing",
        found="torch compiles DeepSpeed's ops with it",
        mend="pip install ninja",
    )


def software_checks(machine: Machine) -> Iterator[Check]:
    """In the order in which a person would mend things."""
    yield _python(machine)
    yield _driver(machine)
    yield from (_package(row, machine) for row in PACKAGES)
    for check in (_torch_build, _nvcc, _compiler, _python_headers, _ninja):
        yield check(machine)

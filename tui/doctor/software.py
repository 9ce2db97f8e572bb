"""Checks of the software: Python, packages, torch against driver and nvcc, the compiler.

Nothing here imports torch or its family: versions come from package metadata and from files, the
rest from NVML and the tools' own version flags.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator

from msgspec import Struct

from llmtop.presets.version import install_words, package_version
from llmtop.profiler.hardware.aside import ask_once
from llmtop.trainer.folders import why_not_writable
from llmtop.trainer.supervisor.extensions import VARIABLE as EXTENSIONS
from llmtop.trainer.supervisor.extensions import extensions_dir
from llmtop.trainer.toolchain import (
    TRITON_CACHE,
    compiler,
    fits_torch,
    mended,
    ninja_folder,
    other_toolkit,
    python_header,
    refused_gcc,
    toolkit,
    torch_cuda,
    triton_cache,
)
from llmtop.tui.doctor.check import UNANSWERED, Check, Machine, Status


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
    PackageRow("torchao", "--qat", "qat", (0, 18), (0, 19)),
    PackageRow("datasets", "saved datasets folders as --data", "data", (4,)),
    PackageRow("gguf", "quantize --to gguf:KIND", "quantize", (0, 19), (0, 20)),
    PackageRow("sentencepiece", "quantize --to gguf:KIND of models with its tokenizer", "quantize", (0, 2)),
    PackageRow("pyarrow", "export with metrics as Parquet", "export", (18,)),
    PackageRow("prometheus-client", "serve-metrics", "metrics", (0, 20)),
    PackageRow("tensorboardX", "--tensorboard", "tensorboard", (2, 6)),
    PackageRow("wandb", "--wandb", "wandb", (0, 18)),
    PackageRow("mlflow-skinny", "--mlflow", "mlflow", (2, 18)),
)


def look_at_machine() -> Machine:
    torch_version = package_version("torch")
    told = ask_once(_nvml, None)
    names, driver, cuda = told or ((), None, None)
    return Machine(
        torch_version=torch_version,
        torch_cuda=torch_cuda() if torch_version else None,
        gpu_names=names,
        driver_version=driver,
        driver_cuda=cuda,
        driver_silent=told is None,
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


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
    version = package_version(row.name)
    # Without a driver a CUDA build of torch is gigabytes for nothing.
    held = (
        ""
        if machine.driver_version or machine.driver_silent or row.extra != "train"
        else "-c constraints-cpu.txt "
    )
    mend = install_words(row.extra, held)
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
    if machine.driver_silent:
        return Check(name="gpu", status="warn", found="the NVIDIA driver does not answer", mend=UNANSWERED)
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
    """DeepSpeed compiles its CUDA ops on first use, with the toolkit that torch finds."""
    name = "nvcc"
    kit = toolkit(os.environ)
    found = f"CUDA {_dotted(kit.release)} in {kit.home}" if kit and kit.release else ""
    if machine.torch_cuda is None:
        return Check(
            name=name, status="ok", found=f"{found or 'none'}; not needed without a CUDA build of torch"
        )
    if kit is not None and fits_torch(kit, machine.torch_cuda):
        return Check(name=name, status="ok", found=found)
    other = other_toolkit(os.environ, machine.torch_cuda)
    if other is not None and not (kit and kit.chosen):
        return Check(
            name=name, status="ok", found=f"ranks will use CUDA {_dotted(other.release)} in {other.home}"
        )
    wanted = f"CUDA {machine.torch_cuda} toolkit"
    mend = f"export CUDA_HOME={other.home}" if other else f"install the {wanted} and set CUDA_HOME"
    mend += "; or --optimizer adamw_torch"
    if kit is None or kit.release is None:
        where = f"none in {kit.home}; " if kit else ""
        found = f"{where}DeepSpeed's fused Adam is compiled with it on first use"
        return Check(name=name, status="missing", found=found, mend=mend)
    found += f"; torch is built for CUDA {machine.torch_cuda}: what it compiles does not fit"
    return Check(name=name, status="warn", found=found, mend=mend)


def _dotted(number: tuple[int, int] | None) -> str:
    return ".".join(map(str, number or ()))


def _compiler(machine: Machine) -> Check:
    name = "c++ compiler"
    command, version = compiler(os.environ)
    if version is None:
        return Check(
            name=name,
            status="missing",
            found=f"{command} does not run; DeepSpeed's ops and CPU Adam are compiled on first use",
            mend="install g++ (Debian: apt install g++)",
        )
    usual = mended(os.environ, machine.torch_cuda)
    refused = None if machine.torch_cuda is None else refused_gcc(usual, command)
    if refused is None:
        return Check(name=name, status="ok", found=version)
    _, bound = refused
    chosen = usual.get("CXX")
    if chosen and chosen != command:
        return Check(name=name, status="ok", found=f"{version}, too new for nvcc; ranks will use {chosen}")
    return Check(
        name=name,
        status="warn",
        found=f"{version}; this nvcc takes gcc below {bound}",
        mend=f"install g++-{bound - 1}, export CC=gcc-{bound - 1} CXX=g++-{bound - 1}",
    )


def _python_headers(_machine: Machine) -> Check:
    header = python_header()
    if header.exists():
        return Check(name="python headers", status="ok", found=str(header))
    return Check(
        name="python headers",
        status="missing",
        found=f"{header} is not there; DeepSpeed's ops need it to compile",
        mend="install Python's development files (Debian: apt install python3-dev)",
    )


def _ninja(_machine: Machine) -> Check:
    path = shutil.which("ninja")
    if path:
        return Check(name="ninja", status="ok", found=path)
    folder = ninja_folder(os.environ)
    if folder:
        return Check(
            name="ninja", status="ok", found=f"in {folder}, which is not on PATH; for ranks it will be"
        )
    return Check(
        name="ninja",
        status="missing",
        found="torch compiles and loads DeepSpeed's ops through it",
        mend="pip install ninja",
    )


def _extensions(_machine: Machine) -> Check:
    name, folder = "compiled ops", extensions_dir(os.environ)
    reason = why_not_writable(folder)
    if reason:
        return Check(
            name=name,
            status="missing",
            found=f"{folder} cannot be written: {reason}",
            mend=f"make room, or export {EXTENSIONS}=DIR, a folder that is yours",
        )
    built = sorted(file.stem for file in folder.glob("*/*.so"))
    return Check(name=name, status="ok", found=f"{folder}: {', '.join(built) or 'none built yet'}")


def _triton_cache(_machine: Machine) -> Check:
    name, folder = "triton cache", triton_cache(os.environ)
    reason = why_not_writable(folder)
    if reason is None:
        return Check(name=name, status="ok", found=str(folder))
    if TRITON_CACHE in os.environ:
        return Check(
            name=name,
            status="warn",
            found=f"{folder} cannot be written: {reason}; Liger's kernels are kept there",
            mend=f"export {TRITON_CACHE}=DIR, a folder that is yours, or unset it",
        )
    return Check(name=name, status="ok", found=f"{folder} cannot be written; ranks will use another folder")


def software_checks(machine: Machine) -> Iterator[Check]:
    """In the order in which a person would mend things."""
    yield _python(machine)
    yield _driver(machine)
    yield from (_package(row, machine) for row in PACKAGES)
    for check in _TOOLS:
        yield check(machine)


_TOOLS = (_torch_build, _nvcc, _compiler, _python_headers, _ninja, _extensions, _triton_cache)

"""Checks of the system: what the kernel, the container and the environment allow a run."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable
from pathlib import Path

from llmtop.profiler.hardware.host import HostReader
from llmtop.profiler.hardware.libaio import libaio
from llmtop.profiler.units import format_bytes
from llmtop.trainer.supervisor.extensions import extensions_dir, stale_locks
from llmtop.trainer.supervisor.rankenv import ARCH_LIST, deepspeed_archs
from llmtop.tui.doctor.check import Check, Machine

SMALL_SHM_BYTES = 1 << 30
"""Container engines give 64 MiB unless told; NCCL and data workers want more."""


def _libaio(_machine: Machine) -> Check:
    library = libaio()
    if library is not None:
        return Check(name="libaio", status="ok", found=library)
    return Check(
        name="libaio",
        status="optional",
        found="header or library not there; only NVMe offload needs it",
        mend="Debian: apt install libaio-dev",
    )


def _shared_memory(_machine: Machine) -> Check:
    try:
        info = os.statvfs("/dev/shm")
    except OSError as error:
        return Check(name="/dev/shm", status="missing", found=str(error), mend="mount a tmpfs on /dev/shm")
    size = info.f_blocks * info.f_frsize
    if size < SMALL_SHM_BYTES:
        return Check(
            name="/dev/shm",
            status="warn",
            found=f"{format_bytes(size)}; NCCL between GPUs of one host may run out of it",
            mend="start the container with --shm-size=8g or --ipc=host",
        )
    return Check(name="/dev/shm", status="ok", found=format_bytes(size))


def _locked_memory(machine: Machine) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check(name="ulimit -l", status="ok", found="unlimited")
    found = f"{format_bytes(soft)} may be locked"
    if not machine.gpu_names:
        return Check(name="ulimit -l", status="ok", found=f"{found}; nothing is pinned without a GPU")
    allowed = hard == resource.RLIM_INFINITY
    raise_to = (
        "unlimited" if allowed else "unlimited, which needs root here (or docker run --ulimit memlock=-1)"
    )
    return Check(
        name="ulimit -l",
        status="warn",
        found=f"{found}; pinned buffers of CPU and NVMe offload may not fit",
        mend=f"ulimit -l {raise_to}",
    )


def _memory_limit(_machine: Machine) -> Check:
    """A cgroup limit kills a rank with SIGKILL, whatever the machine has."""
    host = HostReader().read()
    limit, total = host.cgroup_limit_bytes, host.memory_total_bytes
    if limit is None:
        return Check(name="memory limit", status="ok", found=f"none; the machine has {format_bytes(total)}")
    return Check(
        name="memory limit",
        status="warn" if total is not None and limit < total else "ok",
        found=f"{format_bytes(limit)} by cgroup, of {format_bytes(total)}; above it the kernel kills ranks",
        mend="raise the limit of the container or the job (--memory) if CPU offload needs more",
    )


def _wsl(_machine: Machine) -> Check:
    try:
        kernel = Path("/proc/sys/kernel/osrelease").read_text(encoding="utf-8").strip()
    except OSError:
        kernel = os.uname().release
    if "microsoft" not in kernel.lower():
        return Check(name="kernel", status="ok", found=kernel)
    return Check(
        name="kernel",
        status="warn",
        found=f"{kernel}: WSL lets little memory be pinned",
        mend="with CPU offload: --set deepspeed.zero_optimization.offload_optimizer.pin_memory=false",
    )


def _arch_list(_machine: Machine) -> Check:
    """DeepSpeed reads the minor version with int(): `9.0a` ends in "invalid literal for int(): '0a'"."""
    name = ARCH_LIST
    text = os.environ.get(name)
    if text is None:
        return Check(name=name, status="ok", found="not set")
    items = [item for item in re.split(r"[;\s]+", text) if item]
    bad = [item for item in items if not re.fullmatch(r"\d+\.\d+(\+PTX)?", item)]
    if not bad:
        return Check(name=name, status="ok", found=text)
    return Check(
        name=name,
        status="warn",
        found=f"{text}: DeepSpeed cannot read {', '.join(bad)} when it compiles an op",
        mend=f"export {name}='{deepspeed_archs(text)}'",
    )


def _extension_locks(_machine: Machine) -> Check:
    """A build that was killed leaves a lock, and the next one waits for it for ever, in silence."""
    name = "extension locks"
    folders = {extensions_dir(os.environ), Path.home() / ".cache" / "torch_extensions"}
    stale = [lock for folder in sorted(folders) for lock in stale_locks(folder)]
    if not stale:
        return Check(name=name, status="ok", found="none")
    return Check(
        name=name,
        status="warn",
        found=f"{len(stale)} left by builds that were killed; a program that meets one waits for ever",
        mend="rm " + " ".join(str(lock) for lock in stale),
    )


CHECKS: tuple[Callable[[Machine], Check], ...] = (
    _memory_limit,
    _shared_memory,
    _locked_memory,
    _wsl,
    _libaio,
    _arch_list,
    _extension_locks,
)

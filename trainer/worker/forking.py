"""What a process has to do so that ranks can be forked from it: a CUDA context does not survive a fork."""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_CUDA_NOT_INITIALIZED = 3
_MOST_INITS = 1000


def cuda_touched() -> str:
    """How this process has touched CUDA; empty when it has not.

    NVML does not count, though it opens `/dev/nvidia-uvm` too (driver 580): `forget_nvml` gives it up.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "torch has initialized CUDA"
    if not any("libcuda.so" in line for line in Path("/proc/self/maps").read_text().splitlines()):
        return ""
    count = ctypes.c_int()
    if ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) != _CUDA_NOT_INITIALIZED:
        return "cuInit has been called"
    return ""


def let_torchao_in(needed: bool) -> None:
    """Only where it is needed: its import makes a context on the device (torchao 0.18.0, `utils.py`,
    `is_sm_at_least_89`), and transformers and peft import it wherever it is installed.
    """
    if not needed:
        sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]  # documented: the import is refused
    elif sys.modules.get("torchao", ...) is None:
        del sys.modules["torchao"]


def forget_nvml() -> None:
    """Undo each nvmlInit of an import (torch counts devices with it), so that ranks start their own."""
    if any("libnvidia-ml" in line for line in Path("/proc/self/maps").read_text().splitlines()):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        for _ in range(_MOST_INITS):
            if library.nvmlShutdown() != 0:
                break


def end_after(work: Callable[[], int]) -> NoReturn:
    """In a forked copy: it ends with the work's exit code, and never goes on with what its parent was at."""
    code = 1
    try:
        code = work()
    except BaseException:  # noqa: BLE001 - whatever it was, it is shown, and the copy of the parent must end
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def restart_nvml() -> None:
    """DeepSpeed opens NVML at its import and counts on that later (0.19.8, `cuda_accelerator.py`)."""
    nvml = sys.modules.get("pynvml")
    if nvml is not None and os.environ.get("DS_ACCELERATOR") == "cuda":
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()

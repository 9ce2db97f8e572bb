"""What a run was launched in: versions, machine, driver, and the variables that training hangs on.

Written beside the spec when the run is launched, without secrets: a file that somebody may copy by hand never
held them.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from llmtop.presets.foreign import read_json
from llmtop.profiler.export.secrets import Scrubber
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.wholefile import document, write_atomic

_PREFIXES = (
    *("CUDA_", "NCCL_", "NVIDIA_", "TORCH", "PYTORCH_", "DS_", "DEEPSPEED_", "HF_", "TRANSFORMERS_"),
    *("TOKENIZERS_", "OMP_", "MKL_", "GLOO_", "TRITON_", "WANDB_", "MLFLOW_", "LLMTOP_", "SLURM_", "MASTER_"),
    *("ACCELERATE_", "BNB_", "BITSANDBYTES_", "FLASH_ATTENTION_", "UCX_", "FI_", "KMP_", "MALLOC_", "PYTHON"),
)
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CC", "CXX", "MAX_JOBS")
_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b")


class Environment(Struct, frozen=True, kw_only=True):
    """None: not known, or there is none."""

    host: str | None = None
    system: str | None = None
    """Kernel and its release."""
    machine: str | None = None
    python: str | None = None
    driver: str | None = None
    """NVIDIA's, from the kernel."""
    cpus: int | None = None
    variables: dict[str, str] = {}
    """Those that training hangs on; secrets as `[removed]`."""


def read_environment(variables: Mapping[str, str], *, driver: Path = _DRIVER) -> Environment:
    """Of this machine and these variables."""
    kept = {name: value for name, value in variables.items() if name in _NAMES or name.startswith(_PREFIXES)}
    return Environment(
        host=platform.node() or None,
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine() or None,
        python=sys.version.split()[0],
        driver=_driver_version(driver),
        cpus=os.cpu_count(),
        variables=Scrubber(variables).environment(kept),
    )


def record_environment(run: RunDir) -> None:
    """Of the calling process, which launches the run. Raises OSError where it cannot be written."""
    write_atomic(run.environment_path, document(read_environment(os.environ)))


def recorded_environment(run: RunDir) -> Environment:
    """As it was written at launch; empty for a run of an older version, or where it is damaged."""
    try:
        return read_json(run.environment_path, Environment)
    except (OSError, msgspec.MsgspecError):
        return Environment()


def _driver_version(path: Path) -> str | None:
    try:
        found = _DRIVER_VERSION.search(path.read_text())
    except OSError:
        return None
    return found[1] if found else None

"""Ranks that are made ready while others train: started, imported, and held until the others have left.

Loading the libraries is the longest part of a start-up that needs nothing of the run's state, so a relaunch
does not wait for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from llmtop.profiler.record.rundir import RunDir

VARIABLE = "LLMTOP_STANDBY_SETTING"
"""In a rank's environment: the setting that it is to train on once it is let go."""
TOUCHES_CUDA = ("bitsandbytes", "peft", "transformers.trainer", "liger_kernel")
"""Modules that make a context on the device when they are imported, half a GB that ranks which still train
may need: bitsandbytes asks for the device's capability (0.50, `cuda_specs.py`), peft imports it, Trainer of
transformers imports peft, Liger asks the device too. Seen on H200."""
_POLL_SECONDS = 0.02


def standby_setting(environment: Mapping[str, str] = os.environ) -> int | None:
    """None for a rank that begins at once."""
    number = environment.get(VARIABLE, "")
    return int(number) if number.isdecimal() else None


def touches_cuda(module: str) -> bool:
    """Whether importing it makes a context on the device."""
    return any(module == name or module.startswith(f"{name}.") for name in TOUCHES_CUDA)


def mark_ready(run: RunDir, setting: int, rank: int) -> None:
    folder = run.standby_dir(setting)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / f"ready-{rank}").touch()


def count_ready(run: RunDir, setting: int) -> int:
    return len(list(run.standby_dir(setting).glob("ready-*")))


def let_go(run: RunDir, setting: int) -> None:
    (run.standby_dir(setting) / "go").touch()


def wait_for_go(run: RunDir, setting: int) -> None:
    """Who waits here ends with its supervisor."""
    go = run.standby_dir(setting) / "go"
    while not go.exists():
        time.sleep(_POLL_SECONDS)

"""Puts GPUs where a supervisor of its own process looks for the driver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_DRIVER = """
import importlib.util, sys
from pathlib import Path

here = Path(__file__).resolve()
real = next(p for d in sys.path if (p := Path(d, "pynvml.py")).exists() and p.resolve() != here)
spec = importlib.util.spec_from_file_location("pynvml", real)
sys.modules["pynvml"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

from tests.fake_nvml import FakeGpu, FakeNvml

GPUS
sys.modules["pynvml"] = FakeNvml(*gpus)
"""
"""Stands before the real binding on the path, and puts GPUs where it has none."""

_SHUT = """
import time
gpus = [FakeGpu(uuid=f"GPU-{number}") for number in range(GPU_COUNT)]

class Shut(FakeNvml):
    def nvmlInit(self):
        while not Path(OPENS).exists():
            time.sleep(0.02)
        super().nvmlInit()

FakeNvml = Shut
"""


def shut_until(opens: Path, gpus: int = 1) -> str:
    """GPUs whose driver does not answer before there is a file `opens`."""
    return _SHUT.replace("GPU_COUNT", str(gpus)).replace("OPENS", repr(str(opens)))


def stand_in_for_the_driver(monkeypatch: pytest.MonkeyPatch, folder: Path, gpus: str) -> None:
    """From now on processes that are started see what the code `gpus` puts into the list `gpus`."""
    folder.mkdir()
    (folder / "pynvml.py").write_text(_DRIVER.replace("GPUS", gpus))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(_ROOT)]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

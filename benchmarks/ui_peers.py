"""Other terminal monitors that install from the index, for `benchmarks.ui`: nvitop, memray live, wandb.

Where there is no NVIDIA driver, nvitop reads eight GPUs from a stand-in for its library (`nvml_standin.c`),
whose calls cost nothing: it is then cheaper than on a real box, never dearer.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ui_terminal import BenchTerminal, cost_at_rest

_NVML = "libnvidia-ml.so.1"


class Peer(NamedTuple):
    command: list[str]
    words: tuple[str, ...]
    """That stand on its first whole screen."""
    env: dict[str, str] = {}
    tells: str = ""
    """How it was run, where that is not the usual way."""


def peers_of(venv: Path, folder: Path) -> dict[str, Peer]:
    """The monitors of this virtual environment, at one reading a second where they can be told.

    Raises:
        RuntimeError: The stand-in for NVML cannot be built; with the compiler's words.
    """
    program = folder / "loop.py"
    program.write_text("import time\nwhile True:\n    x = bytearray(1 << 20)\n    time.sleep(0.05)\n")
    env, tells = _nvml(folder)
    nvitop = [str(venv / "bin/nvitop"), "--monitor", "full", "--interval", "1"]
    return {
        "memray live": Peer(
            [str(venv / "bin/memray"), "run", "--live", str(program)], ("Heap Usage", "Samples: ")
        ),
        "nvitop": Peer(nvitop, ("NVITOP", "Driver", "H200" if tells else "GPU"), env, tells),
        "wandb leet symon": Peer(
            [str(venv / "bin/wandb"), "leet", "symon", "--interval", "1s"], ("LEET", "Top processes")
        ),
    }


def _nvml(folder: Path) -> tuple[dict[str, str], str]:
    try:
        ctypes.CDLL(_NVML)
    except OSError:
        source = Path(__file__).with_name("nvml_standin.c")
        built = subprocess.run(
            [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O2", "-o", str(folder / _NVML), str(source)],
            capture_output=True,
            text=True,
        )
        if built.returncode:
            raise RuntimeError(f"{source.name} cannot be built: {built.stderr.strip()}") from None
        return {"LD_LIBRARY_PATH": str(folder)}, "eight GPUs of a stand-in for NVML"
    return {}, ""


def peers_at_rest(
    venv: Path, folder: Path, env: Mapping[str, str], seconds: float
) -> Iterator[dict[str, Any]]:
    """Processor and bytes of each beside nothing else, with what it has started but what memray watches."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, peer in peers_of(venv, folder).items():
        row: dict[str, Any] = {"figure": f"at rest, {name}, 120x40"} | (
            {"how": peer.tells} if peer.tells else {}
        )
        alone = name == "memray live"
        try:
            with BenchTerminal(
                peer.command, {**env, **peer.env}, columns=120, rows=40, with_children=not alone
            ) as terminal:
                terminal.wait_for(*peer.words, give_up=30.0)
                yield {**row, **cost_at_rest(terminal, seconds)}
        except (TimeoutError, OSError) as error:
            yield {**row, "value": "n/a", "why": str(error)[:300]}

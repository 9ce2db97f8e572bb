"""What a target of the fuzzing is, and what makes a case of it fail."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from benchmarks.fuzzing.making import Maker
from llmtop.presets.errors import LlmtopError
from llmtop.presets.resolve import Machine
from llmtop.presets.tensorfile import BrokenWeights

HERE = Machine(gpu="h200", gpus=2, host_memory_bytes=1 << 40, gpu_memory_bytes=150_754_820_096)
CASE = "case"
"""Folder of a case within the place that a target has."""
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|/\S+|[-+]?\d[\d.,e+-]*|[^\x20-\x7e]+")

Make = Callable[[Maker, Path], None]
"""Writes a case's input into its folder."""
Act = Callable[[Path], object]
"""Does with it what the product does; refuses with an error of ours."""


class Target(Struct, frozen=True, kw_only=True):
    name: str
    make: Make
    act: Act
    prepare: Callable[[Path], None] = lambda place: None
    """Makes once what all cases start from."""
    share: float = 1.0
    """Of the cases, against the others: what takes longer gets fewer."""


class Told(Exception):
    """An error of a file or its form, which the caller in the product tells in words."""


class Unnamed(AssertionError):
    """A refusal that does not say what is wrong."""


def place_of(place: Path) -> Path:
    """An empty folder for a case."""
    folder = place / CASE
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def prepared(target: Target, place: Path) -> None:
    """Everything that the product looks for elsewhere lies in this place."""
    place.mkdir(parents=True, exist_ok=True)
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HOME"):
        os.environ[name] = str(place / "home")
    os.environ["LLMTOP_RUNS_DIR"] = str(place / CASE / "runs")
    target.prepare(place)


def outcome_of(target: Target, maker: Maker, place: Path) -> str:
    """Why the case was refused, in words without its values; empty for one that was taken.

    Raises whatever is no refusal of ours, and Unnamed for one that says nothing.
    """
    folder = place_of(place)
    target.make(maker, folder)
    try:
        target.act(folder)
    except LlmtopError as error:
        if not error.what.strip() or not (error.why.strip() or error.fix.strip() or ":" in error.what):
            raise Unnamed(f"says only: {error.what!r}") from error
        return cause(f"{error.what}: {error.why}")
    except BrokenWeights as error:
        return cause(str(error))
    except Told as error:
        return cause(str(error))
    return ""


def cause(text: str) -> str:
    """The words of a refusal without names and numbers, so that refusals can be counted by it."""
    return " ".join(_VARYING.sub("_", text).split())[:100]

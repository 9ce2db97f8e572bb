"""Architectures without formulas: their real modelling code is traced once, and the answer kept.

The trace runs in a process of its own, started by name (`profiler/probes/trace_model.py`): nothing here
imports torch. It needs the training packages, no GPU and no network. What it found lies in
`$XDG_CACHE_HOME/llmtop/traces/`, one file for each configuration and versions of torch and transformers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.errors import UsageError
from llmtop.presets.foreign import read_json
from llmtop.presets.paths import cache_dir
from llmtop.presets.spec import ModelShape
from llmtop.presets.version import install_words

MODULE = "llmtop.profiler.probes.trace_model"
FORM = 2
"""Of the answer and of how it is made: another one makes every kept answer anew."""
LIMIT_SECONDS = 180.0
_PACKAGES = ("torch", "transformers")
_may_wait: ContextVar[bool] = ContextVar("may_wait", default=True)
_answers: dict[str, Answer] = {}
"""Each configuration is traced once in the life of this process, whatever came of it."""


class NotTracedYetError(UsageError):
    """An architecture that would have to be traced, where nobody can wait for that."""


@contextmanager
def without_waiting() -> Iterator[None]:
    """Nothing is traced inside: what is not known yet raises NotTracedYetError.

    For a screen that must not stand still; `traced_shape` for the same configuration, from a thread that may
    wait, makes the answer known.
    """
    token = _may_wait.set(False)
    try:
        yield
    finally:
        _may_wait.reset(token)


class Answer(Struct, frozen=True, kw_only=True):
    """What the tracing process says: one of the two."""

    shape: ModelShape | None = None
    """Its name is for the asker to fill in."""
    refused: str = ""
    """Why there is none."""


def traced_shape(config: dict[str, Any], name: str, unknown: UsageError) -> ModelShape:
    """The shape that the modelling code of transformers has for the configuration.

    Raises `unknown`, the error of an architecture that has no formulas, with the reason why no trace helps;
    NotTracedYetError inside `without_waiting`.
    """
    versions = _versions()
    if versions is None:
        missing = "torch and transformers, whose code would be traced, are not both installed"
        fix = f"{install_words('train')}, then again"
        raise _because(unknown, f"it has no formulas here, and {missing}", fix)
    if not _is_named(str(config["model_type"])):
        raise _because(unknown, "it has no formulas here, and transformers does not know it either")
    path = _path(config, versions)
    shape = _kept(path)
    if shape is None:
        answer = _asked(config)
        if answer.shape is None:
            raise _because(unknown, f"it has no formulas here, and cannot be traced: {answer.refused}")
        shape = answer.shape
        _keep(path, shape)
    return replace(shape, name=name)


def _because(unknown: UsageError, why: str, fix: str | None = None) -> UsageError:
    return UsageError(unknown.what, why=why, fix=fix or unknown.fix)


def _versions() -> dict[str, str] | None:
    """Of the packages that are traced; None where one is missing."""
    try:
        return {package: metadata.version(package) for package in _PACKAGES}
    except metadata.PackageNotFoundError:
        return None


def _is_named(model_type: str) -> bool:
    """Whether transformers' own lists may have the name. They are searched as text: importing takes seconds.

    A package without such lists may know anything.
    """
    found = importlib.util.find_spec("transformers")
    folder = Path(found.origin).parent / "models" / "auto" if found and found.origin else None
    lists = sorted(folder.glob("*.py")) if folder else []
    name = f'"{model_type}"'
    return not lists or any(name in path.read_text(encoding="utf-8") for path in lists)


def _path(config: dict[str, Any], versions: dict[str, str]) -> Path:
    key = json.dumps([FORM, versions, config], sort_keys=True)
    return cache_dir() / "traces" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _kept(path: Path) -> ModelShape | None:
    """The kept answer; a broken file counts as none: it is made anew in seconds."""
    try:
        return read_json(path, ModelShape)
    except (OSError, msgspec.DecodeError):
        return None


def _keep(path: Path, shape: ModelShape) -> None:
    """A folder that cannot be written to costs the next caller the same seconds, and nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_bytes(msgspec.json.encode(shape))
        aside.replace(path)
    except OSError:
        return


def _asked(config: dict[str, Any]) -> Answer:
    """The tracing process's answer, of now or of before."""
    text = json.dumps(config, sort_keys=True)
    if text not in _answers:
        if not _may_wait.get():
            raise NotTracedYetError(
                f"'{config['model_type']}' is being traced",
                why="it has no formulas here: its own code is run once, on tensors without data",
                fix="wait: it takes 5 to 20 seconds, and the answer is kept",
            )
        _answers[text] = _traced(text)
    return _answers[text]


def _traced(config: str) -> Answer:
    """What the tracing process says, or why it says nothing."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-m", MODULE],
            input=config.encode(),
            capture_output=True,
            timeout=LIMIT_SECONDS,
            env={**os.environ, **offline},
        )
    except subprocess.TimeoutExpired:
        return Answer(refused=f"it took longer than {LIMIT_SECONDS:g} s")
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return Answer(
            refused=f"the tracing process failed: {lines[-1] if lines else f'exit {done.returncode}'}"
        )
    return msgspec.json.decode(done.stdout, type=Answer)

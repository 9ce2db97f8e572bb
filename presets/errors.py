"""What a person is told when something is wrong: what happened, why, and what to do about it.

Every mistake that a person can make ends in a `LlmtopError`; the command line prints it without a
traceback and ends with its exit code. Anything else that is raised is a bug and shows a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit codes of every command; scripts rely on them."""

    DONE = 0
    BUG = 1
    USAGE = 2
    DOES_NOT_FIT = 3
    JOB_FAILED = 4
    OUT_OF_MEMORY = 5
    INTERRUPTED = 130


class LlmtopError(Exception):
    """A refusal or failure that a person can act on."""

    exit_code = ExitCode.USAGE

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    @property
    def in_one_line(self) -> str:
        """What and why, without what to do."""
        return f"{self.what}: {self.why}" if self.why else self.what

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class UsageError(LlmtopError):
    """Wrong option, key, value or file. Nothing was loaded or started."""


class PackedWeightsError(UsageError):
    """A folder's weights are packed: its shape can be read, and nothing can start from its numbers."""

    def __init__(self, folder: Path, config: Path, method: str) -> None:
        super().__init__(
            f"{folder}: its weights are packed ({method or 'its config.json does not name how'})",
            why="its config.json says so in quantization_config, and training starts from 16- or 32-bit ones",
            fix=f"give the folder with those, or {config} itself: the same shape, from random weights",
        )
        self.config = config
        """The file of its shape."""
        self.method = method
        """The program's name, as config.json has it; empty where it has none."""


class DoesNotFitError(LlmtopError):
    """The prediction says that the run needs more memory than there is."""

    exit_code = ExitCode.DOES_NOT_FIT


class JobFailedError(LlmtopError):
    """A training job ended with a failure."""

    exit_code = ExitCode.JOB_FAILED


class OutOfMemoryError(LlmtopError):
    """A training job ran out of device or host memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


_SLIP, _CLOSE = 0.85, 0.75
"""Likeness of a word with a letter or two wrong, and of one that may be; below, words are alike by chance."""
_CLOSE_SHORT, _SHORT = 0.65, 4
"""For words of few letters, of which one is a large part: gpu and cpu."""
_SHORTEST_START = 3
_MOST_NAMED = 12
_OTHER_NAMES = {
    **dict.fromkeys(("lr", "learn-rate"), "learning-rate"),
    "wd": "weight-decay",
    **dict.fromkeys(
        ("bs", "batch", "batch-size", "per-device-train-batch-size", "per-device-batch-size"), "micro-batch"
    ),
    "train-micro-batch-size-per-gpu": "micro-batch",
    **dict.fromkeys(("gas", "gradient-accumulation", "gradient-accumulation-steps"), "grad-accum"),
    **dict.fromkeys(
        ("context", "max-length", "max-seq-length", "max-seq-len", "block-size", "cutoff-len"), "seq-len"
    ),
    **dict.fromkeys(("epochs", "num-train-epochs", "max-steps"), "steps"),
    **dict.fromkeys(("nproc-per-node", "num-processes"), "gpus"),
    "nnodes": "nodes",
    "zero-stage": "zero",
    "lora-r": "lora-rank",
    "attn-implementation": "attention",
    "model-name-or-path": "model",
    **dict.fromkeys(("dataset", "dataset-name", "train-file"), "data"),
    **dict.fromkeys(("int4", "4bit", "4-bit", "fp4"), "nf4"),
    **dict.fromkeys(("8bit", "8-bit", "llm-int8"), "int8"),
}
"""What options and values are called elsewhere, with no letters in common to find them by."""


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` was most likely meant to be, or None when none is close.

    Besides slips of the hand: `h200-141gb` is h200 with more said, `flash` the beginning of
    flash_attention_2, `4090` the end of rtx-4090, `fa2` initials, `lr` what others call learning_rate.
    """
    folded = {_folded(known): known for known in candidates}
    wanted = _folded(word)
    found = (
        _close(wanted, folded, _SLIP)
        or (_OTHER_NAMES.get(wanted, "") if _OTHER_NAMES.get(wanted) in folded else "")
        or max((name for name in folded if _is_part(name, wanted, wanted.startswith)), key=len, default="")
        or min((name for name in folded if _is_begun(name, wanted)), key=len, default="")
        or min((name for name in folded if _is_part(wanted, name, name.endswith)), key=len, default="")
        or next((name for name in folded if _is_initials(wanted, name)), "")
        or _close(wanted, folded, _CLOSE_SHORT if len(wanted) <= _SHORT else _CLOSE)
    )
    return folded[found] if found else None


def begun(word: str, candidates: Iterable[str]) -> tuple[str, ...]:
    """All that begin with `word`, whatever the marks between letters: `llama3` begins llama-3.1-8b."""
    start = _letters(word)
    return tuple(name for name in candidates if len(start) > 1 and _letters(name).startswith(start))


def _letters(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def _folded(word: str) -> str:
    """Without the dashes of an option: `--batch-size` is looked up as `batch_size` is."""
    return word.lower().replace("_", "-").lstrip("-")


def _close(word: str, names: Iterable[str], cutoff: float) -> str:
    import difflib  # for mistakes alone: every command would wait for it

    return next(iter(difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)), "")


def _is_part(part: str, whole: str, stands: Callable[[str], bool]) -> bool:
    """Whether it stands at that end of the whole, up to a mark."""
    marked = (part + "-", part + ".", "-" + part, "." + part)
    return len(part) >= _SHORTEST_START and (part == whole or any(map(stands, marked)))


def _is_begun(name: str, start: str) -> bool:
    return len(start) >= _SHORTEST_START and name.startswith(start)


def _is_initials(word: str, name: str) -> bool:
    """Two letters are too few: `lr` is not lora_rank."""
    return len(word) >= _SHORTEST_START and word == "".join(part[:1] for part in name.split("-"))


def written(value: object) -> str:
    """A value as files have it, so that nobody meets Python's True: true, null, 1e-5, 'text'."""
    if isinstance(value, float):
        return re.sub(r"e([+-])0+", r"e\1", repr(value)).replace("e+", "e")
    if isinstance(value, str):
        return repr(value)
    import json  # for mistakes, mostly

    return json.dumps(value, default=str)


def unknown_key(where: str, key: str, known: Iterable[str], *, otherwise: str = "") -> UsageError:
    """The error for a key that nothing reads, naming the file or option and the nearest known key.

    `otherwise` says where the keys are listed, where there are too many to name.
    """
    names = sorted(known)
    guess = nearest(key, names)
    listed = otherwise if otherwise and len(names) > _MOST_NAMED else f"known keys: {', '.join(names)}"
    return UsageError(f"{where}: unknown key '{key}'", fix=f"did you mean '{guess}'?" if guess else listed)


def bad_value(
    where: str, key: str, value: object, expected: str, candidates: Iterable[str] = (), fix: str = ""
) -> UsageError:
    """The error for a value that a key cannot take, naming the nearest valid one where there is one.

    `fix` is what else to do.
    """
    guess = nearest(str(value), candidates)
    fix = f"did you mean '{guess}'?" if guess else fix or f"use {expected}"
    return UsageError(
        f"{where}: {key} = {written(value)} is not valid", why=f"{key} takes {expected}", fix=fix
    )

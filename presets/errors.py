"""What a person is told when something is wrong: what happened, why, and what to do about it.

Every mistake that a person can make ends in a `LlmtopError`; the command line prints it without a
traceback and ends with its exit code. Anything else that is raised is a bug and shows a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


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

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class UsageError(LlmtopError):
    """Wrong option, key, value or file. Nothing was loaded or started."""


class DoesNotFitError(LlmtopError):
    """The prediction says that the run needs more memory than there is."""

    exit_code = ExitCode.DOES_NOT_FIT


class JobFailedError(LlmtopError):
    """A training job ended with a failure."""

    exit_code = ExitCode.JOB_FAILED


class OutOfMemoryError(LlmtopError):
    """A training job ran out of device or host memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` was most likely meant to be, or None when none is close."""
    known = list(candidates)
    folded = {c.lower().replace("_", "-"): c for c in known}
    hit = difflib.get_close_matches(word.lower().replace("_", "-"), list(folded), n=1, cutoff=0.6)
    return folded[hit[0]] if hit else None


def unknown_key(where: str, key: str, known: Iterable[str]) -> UsageError:
    """The error for a key that nothing reads, naming the file or option and the nearest known key."""
    names = sorted(known)
    guess = nearest(key, names)
    return UsageError(
        f"{where}: unknown key '{key}'",
        fix=f"did you mean '{guess}'?" if guess else f"known keys: {', '.join(names)}",
    )


def bad_value(
    where: str, key: str, value: object, expected: str, candidates: Iterable[str] = ()
) -> UsageError:
    """The error for a value that a key cannot take, naming the nearest valid one where there is one."""
    guess = nearest(str(value), candidates)
    fix = f"did you mean '{guess}'?" if guess else f"use {expected}"
    return UsageError(f"{where}: {key} = {value!r} is not valid", why=f"{key} takes {expected}", fix=fix)

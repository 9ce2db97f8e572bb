"""Runs cases of a target in this process: how long each took, what memory, and what came of it."""

from __future__ import annotations

import base64
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.fuzzing.fed import case_of
from benchmarks.fuzzing.making import Maker
from benchmarks.fuzzing.target import CASE, Target, outcome_of, prepared

CASE_SECONDS = 10.0
"""Of its processor's time: the machine may have other work."""
CASE_BYTES = 512 << 20
_MOST_CAUSES = 60
_REST = "others"


class TookTooLong(Exception):
    """A case has not come to an end."""


class TookTooMuch(Exception):
    """A case has taken more memory than any input of its size may."""


def maker_of(target: Target, number: int) -> Maker:
    return Maker(random.Random(f"{target.name}:{number}"))


def run_part(
    target: Target, first: int, count: int, place: Path, note: Callable[[int], None]
) -> dict[str, Any]:
    """The cases from a number on; `note` is told which one runs."""
    prepared(target, place)
    tally = Tally()
    for number in range(first, first + count):
        note(number)
        tally.count(target, maker_of(target, number), place, number)
    return tally.told()


class Tally:
    """What came of the cases so far."""

    def __init__(self) -> None:
        self._causes: Counter[str] = Counter()
        self._failures: list[dict[str, Any]] = []
        self._cases = self._taken = self._peak_bytes = 0
        self._slowest_seconds = 0.0
        self._began = time.process_time()

    def count(self, target: Target, maker: Maker, place: Path, number: int) -> None:
        began = time.process_time()
        try:
            with limited() as held:
                cause = outcome_of(target, maker, place)
            self._peak_bytes = max(self._peak_bytes, held())
        except Exception as error:  # noqa: BLE001 (whatever it is, that is what is looked for)
            self._failures.append({"case": number, "error": _words(error), "where": _where(error)})
        else:
            self._causes[cause] += bool(cause)
            self._taken += not cause
        # Not one that Hypothesis has broken off, by what is no Exception.
        self._cases += 1
        self._slowest_seconds = max(self._slowest_seconds, time.process_time() - began)

    @property
    def failures(self) -> list[dict[str, Any]]:
        return self._failures

    def told(self) -> dict[str, Any]:
        most = dict(self._causes.most_common(_MOST_CAUSES))
        refused = self._causes.total()
        rest = refused - sum(most.values())
        return {
            "cases": self._cases,
            "taken": self._taken,
            "refused": refused,
            "causes": most | ({_REST: rest} if rest else {}),
            "seconds": round(time.process_time() - self._began, 2),
            "peak_bytes": self._peak_bytes,
            "slowest_seconds": round(self._slowest_seconds, 4),
            "failures": self._failures[:50],
        }


@contextmanager
def limited() -> Iterator[Callable[[], int]]:
    """Raises TookTooLong or TookTooMuch for what is done inside; afterwards told how many bytes it took."""
    signal.signal(signal.SIGVTALRM, _too_long)
    before = _reset_peak()
    taken = [0]
    signal.setitimer(signal.ITIMER_VIRTUAL, CASE_SECONDS)
    try:
        yield lambda: taken[0]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    taken[0] = max(0, _peak() - before)
    if taken[0] > CASE_BYTES:
        raise TookTooMuch(f"{taken[0]:,} bytes")


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TookTooLong(f"more than {CASE_SECONDS:g} s")


def _reset_peak() -> int:
    """From now on the kernel's largest resident set counts anew (proc(5), clear_refs); what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status").read_bytes()
    at = status.index(b"VmHWM:")
    return int(status[at + 6 : status.index(b"kB", at)]) << 10


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _where(error: Exception) -> str:
    """The innermost place in the product."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/llmtop/" in frame.filename] or list(frames)
    name = own[-1].filename.partition("/llmtop/")[2] or Path(own[-1].filename).name
    return f"{name}:{own[-1].lineno}"


def show(name: str, case: str) -> int:
    """Runs one case where its traceback shows, and prints what it was given.

    `case` is its number, or the input of one of atheris as its row has it.
    """
    from benchmarks.fuzzing.table import target as target_of

    target = target_of(name)
    place = Path(tempfile.mkdtemp())
    prepared(target, place)
    number = int(case) if case.isdecimal() else 0
    if not case.isdecimal():
        target = case_of(target, base64.b64decode(case))
    try:
        print("refused:", outcome_of(target, maker_of(target, number), place) or "no")
    finally:
        for file in sorted(path for path in (place / CASE).rglob("*") if path.is_file()):
            print(f"--- {file}\n{file.read_bytes()[:4000]!r}")
    return 0

"""The process that forks ranks for tests: what it tells of them, and that nobody waits for it for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.warm import Warm

_SAME_NUMBER = """
import sys
for number, _ in enumerate(sys.stdin):
    print('{"pid": 7}', flush=True)
    if number == 0:
        print('{"pid": 7, "code": 3}', flush=True)
"""
"""Its first rank ends at once, and the second has its number."""


def test_a_rank_does_not_end_as_an_earlier_one_of_its_number() -> None:
    warm = Warm([sys.executable, "-c", _SAME_NUMBER])
    try:
        assert warm.start(["x"], {}, Path("log")).wait(60.0) == 3
        assert warm.start(["x"], {}, Path("log")).poll() is None
    finally:
        warm.close()


def test_a_rank_that_never_begins_is_not_waited_for_for_ever() -> None:
    warm = Warm([sys.executable, "-c", "import sys; sys.stdin.read()"], begin_seconds=0.05)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            warm.start(["x"], {}, Path("log"))
    finally:
        warm.close()

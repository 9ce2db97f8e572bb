"""Has a job done by a process of its own, which may need torch, and hears what it says.

The job is one JSON object on its standard input; the answers are JSON objects on its standard output, one a
line. The last of them is what came of it, or `Failed`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TypeVar

import msgspec
from msgspec import Struct

from llmtop.presets.errors import JobFailedError, LlmtopError, OutOfMemoryError

_SHOWN_LINES = 3
_KILLED = -9
_Answer = TypeVar("_Answer")


class Failed(Struct, frozen=True, kw_only=True, tag="failed"):
    """An error for a person, in its three parts."""

    what: str
    why: str = ""
    fix: str = ""


class Task(Struct, frozen=True, kw_only=True):
    """Who does the job, and how it is called in words."""

    module: str
    worker: str
    """As in `the process that packs the model`."""
    failed: str
    """As in `the model could not be packed`."""


def have_done(
    task: Task, job: Struct, decoder: msgspec.json.Decoder[_Answer], on_answer: Callable[[_Answer], object]
) -> _Answer:
    """The last answer; `on_answer` hears each. Raises LlmtopError as the process tells it, or for its end."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", task.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            # A process that could not even start leaves nobody who reads.
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(msgspec.json.encode(job))
            last = _listen(process.stdout, decoder, on_answer)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
        if isinstance(last, Failed):
            raise LlmtopError(last.what, why=last.why, fix=last.fix)
        if last is not None and code == 0:
            return last
        said.seek(0)
        raise _ended_badly(task, code, said.read().decode(errors="replace"))


def _listen(
    answers: IO[bytes], decoder: msgspec.json.Decoder[_Answer], on_answer: Callable[[_Answer], object]
) -> _Answer | None:
    last = None
    for line in answers:
        last = decoder.decode(line)
        on_answer(last)
    return last


def _ended_badly(task: Task, code: int, said: str) -> LlmtopError:
    if code == _KILLED:
        return OutOfMemoryError(
            f"{task.worker} was killed",
            why="the kernel does so when host memory runs out",
            fix="do it when more memory is free",
        )
    lines = said.strip().splitlines()
    why = " / ".join(lines[-_SHOWN_LINES:]) if lines else f"exit code {code}"
    return JobFailedError(task.failed, why=why)

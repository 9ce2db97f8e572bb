"""Has a job done by a process of its own, which may need torch, and hears what it says."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import IO

import msgspec

from llmtop.presets.errors import JobFailedError, LlmtopError, OutOfMemoryError
from llmtop.trainer.quantize.job import Answer, Failed, Job, Working

MODULE = "llmtop.trainer.worker.packing"
Progress = Callable[[Working], object]
_SHOWN_LINES = 3
_KILLED = -9


def have_done(job: Job, on_progress: Progress) -> Answer:
    """The last answer. Raises LlmtopError as the process tells it, or for how it ended."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            # A process that could not even start leaves nobody who reads.
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(msgspec.json.encode(job))
            last = _listen(process.stdout, on_progress)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
        if isinstance(last, Failed):
            raise LlmtopError(last.what, why=last.why, fix=last.fix)
        if last is not None and not isinstance(last, Working) and code == 0:
            return last
        said.seek(0)
        raise _ended_badly(code, said.read().decode(errors="replace"))


def _listen(answers: IO[bytes], on_progress: Progress) -> Answer | None:
    last: Answer | None = None
    for line in answers:
        last = msgspec.json.decode(line, type=Answer)
        if isinstance(last, Working):
            on_progress(last)
    return last


def _ended_badly(code: int, said: str) -> LlmtopError:
    if code == _KILLED:
        return OutOfMemoryError(
            "the process that packs the model was killed",
            why="the kernel does so when host memory runs out",
            fix="do it when more memory is free",
        )
    lines = said.strip().splitlines()
    return JobFailedError(
        "the model could not be packed",
        why=" / ".join(lines[-_SHOWN_LINES:]) if lines else f"exit code {code}",
    )

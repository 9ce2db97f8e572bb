"""Has a job of packing done by a process of its own, and hears how far it is."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from llmtop.presets.errors import JobFailedError
from llmtop.trainer import elsewhere
from llmtop.trainer.quantize.job import Answer, Job, Measured, Packed, Working

_TASK = elsewhere.Task(
    module="llmtop.trainer.worker.packing",
    worker="the process that packs the model",
    failed="the model could not be packed",
)
_DECODER: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
Progress = Callable[[Working], object]


def have_done(job: Job, on_progress: Progress) -> Packed | Measured:
    """What came of it. Raises LlmtopError as the process tells it, or for how it ended."""

    def hear(answer: Answer) -> None:
        if isinstance(answer, Working):
            on_progress(answer)

    last = elsewhere.have_done(_TASK, job, _DECODER, hear)
    if not isinstance(last, Packed | Measured):
        raise JobFailedError(_TASK.failed, why=f"the answer was {last}")
    return last

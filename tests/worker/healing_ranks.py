"""One rank that trains runs one after the other, with out-of-memory errors planted: `RUNDIR RUNDIR ...`.

Each run's folder holds in `plants.json` where they are: ranks, step, place, and the micro-batch from which on
there is not enough memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.pdeath import die_with_parent
from llmtop.trainer.worker import session
from llmtop.trainer.worker.malloc import return_freed_memory
from llmtop.trainer.worker.place import Place, place_from_environment
from llmtop.trainer.worker.process_group import join_process_group, leave_process_group
from llmtop.trainer.worker.stages import StageLog
from llmtop.trainer.worker.stopping import StopRequest

PLANTS = "plants.json"
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 512.00"
    " MiB is free. Including non-PyTorch memory, this process has 78.60 GiB memory in use. Of the allocated"
    " memory 70.00 GiB is allocated by PyTorch, and 5.25 GiB is reserved by PyTorch but unallocated."
)


class Plants:
    """What fails on this rank."""

    def __init__(self, plants: list[dict[str, Any]], place: Place, stages: StageLog) -> None:
        self._plants = [plant for plant in plants if place.rank in plant["ranks"]]
        self._stages = stages
        self._engine: Any = None

    def into(self, engine: Any) -> Any:
        self._engine = engine
        model = engine.module
        model.register_forward_pre_hook(lambda *_: self._fail("forward"))
        # The first gradient of a backward pass, and one of the last, when most have been reduced.
        model.lm_head.weight.register_hook(lambda _: self._fail("early"))
        model.model.embed_tokens.weight.register_hook(lambda _: self._fail("late"))
        inner = engine.basic_optimizer
        inner.register_step_pre_hook(lambda *_: self._fail("update"))
        return engine

    def _fail(self, where: str) -> None:
        for plant in self._plants:
            due = (plant["step"], plant["place"]) == (self._stages.step, where)
            # It does not fit in any micro-batch but the first alone.
            whole = self._stages.micro_batch in (None, plant.get("of", 1))
            if due and whole and self._engine.train_micro_batch_size_per_gpu() >= plant["from"]:
                raise torch.OutOfMemoryError(MESSAGE)


def main(folders: list[str]) -> None:
    die_with_parent()
    return_freed_memory()
    runs = [RunDir.open(Path(folder)) for folder in folders]
    place = place_from_environment()
    for run in runs:
        session.import_libraries(run.spec())
    device = join_process_group(place, on_cpu=True)
    build = session.build_engine
    for run in runs:
        with EventWriter(run.events_path(place.source), place.source) as events:
            stages = StageLog(events)
            plants = Plants(json.loads((run.path / PLANTS).read_text()), place, stages)
            session.build_engine = lambda *given, plants=plants: plants.into(build(*given))
            session.train_in_group(run, place, device, events, stages, StopRequest())
    leave_process_group(device)


if __name__ == "__main__":
    main(sys.argv[1:])

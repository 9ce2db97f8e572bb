"""One rank that trains a run and asks itself for snapshots after some steps: `RUNDIR`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from llmtop.profiler.record.eventbase import Event
from llmtop.profiler.record.eventlog import EventWriter, Make
from llmtop.profiler.record.events import ModelBuilt, StepFinished
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotrequest import SnapshotRequest, ask_for_snapshot
from llmtop.trainer.pdeath import die_with_parent
from llmtop.trainer.worker import session
from llmtop.trainer.worker.place import place_from_environment
from llmtop.trainer.worker.process_group import join_process_group, leave_process_group
from llmtop.trainer.worker.stages import StageLog
from llmtop.trainer.worker.stopping import StopRequest

STEPS = 16
ASKS: dict[str, dict[str, Any]] = {
    "trace": {"after": 2, "number": 1, "ranks": (0, 1), "steps": 2},
    "modules": {"after": 9, "number": 2, "ranks": (0,), "steps": 1},
}


class Asking(EventWriter):
    """Asks as soon as a step is written, as somebody who watches would."""

    def __init__(self, run: RunDir, source: str, *, asks: bool) -> None:
        super().__init__(run.events_path(source), source)
        self._run = run
        self._asks = asks

    def hold(self, make: Make) -> None:
        self.write(make())

    def write(self, event: Event) -> None:
        super().write(event)
        for what, ask in ASKS.items():
            if self._asks and isinstance(event, StepFinished) and event.step == ask["after"]:
                request = SnapshotRequest(
                    number=ask["number"],
                    what=what,  # type: ignore[arg-type]
                    ranks=ask["ranks"],
                    steps=ask["steps"],
                    stem=f"test-{ask['number']}",
                )
                ask_for_snapshot(self._run, request)


def hooks_of(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def main(folder: str) -> None:
    die_with_parent()
    run = RunDir.open(Path(folder))
    place = place_from_environment()
    session.import_libraries(run.spec())
    device = join_process_group(place, on_cpu=True)
    kept: list[Any] = []
    describe = session.describe

    def keeping(engine: Any, model: Any) -> ModelBuilt:
        kept.extend((model, hooks_of(model)))
        return describe(engine, model)

    session.describe = keeping
    with Asking(run, place.source, asks=place.rank == 0) as events:
        session.train_in_group(run, place, device, events, StageLog(events), StopRequest())
    if place.rank == 0:
        told = {"before": kept[1], "after": hooks_of(kept[0])}
        (run.path / "hooks.json").write_text(json.dumps(told))
    leave_process_group(device)


if __name__ == "__main__":
    main(sys.argv[1])

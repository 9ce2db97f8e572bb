"""One rank that trains runs one after the other, and asks for their changes: `RUNDIR RUNDIR ...`.

Each run's folder holds the settings to go over to, and in `script.json` after which step which is asked for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from llmtop.profiler.record.eventbase import Event
from llmtop.profiler.record.eventlog import EventWriter, Make
from llmtop.profiler.record.events import StepFinished
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.livefile import LiveRequest, ask_ranks
from llmtop.trainer.pdeath import die_with_parent
from llmtop.trainer.worker.malloc import return_freed_memory
from llmtop.trainer.worker.place import place_from_environment
from llmtop.trainer.worker.process_group import join_process_group, leave_process_group
from llmtop.trainer.worker.session import import_libraries, train_in_group
from llmtop.trainer.worker.stages import StageLog
from llmtop.trainer.worker.stopping import StopRequest

SCRIPT = "script.json"


class Asking(EventWriter):
    """Asks for a change as soon as the step before it is written, as somebody who watches would."""

    def __init__(self, run: RunDir, source: str, *, asks: bool) -> None:
        super().__init__(run.events_path(source), source)
        self._run = run
        self._script: dict[str, int] = json.loads((run.path / SCRIPT).read_text()) if asks else {}

    def hold(self, make: Make) -> None:
        self.write(make())

    def write(self, event: Event) -> None:
        super().write(event)
        if isinstance(event, StepFinished) and str(event.step) in self._script:
            ask_ranks(self._run, LiveRequest(setting=self._script[str(event.step)]))


def main(folders: list[str], ask_from: Callable[[int], bool] = lambda rank: rank == 0) -> None:
    die_with_parent()
    return_freed_memory()
    runs = [RunDir.open(Path(folder)) for folder in folders]
    place = place_from_environment()
    for run in runs:
        import_libraries(run.spec())
    device = join_process_group(place, on_cpu=True)
    for run in runs:
        with Asking(run, place.source, asks=ask_from(place.rank)) as events:
            train_in_group(run, place, device, events, StageLog(events), StopRequest())
    leave_process_group(device)


if __name__ == "__main__":
    main(sys.argv[1:])

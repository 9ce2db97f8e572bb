"""One rank that trains several runs one after the other in one process group: `RUNDIR RUNDIR ...`.

Starting a rank costs seconds of imports, a tiny run milliseconds. Runs at ZeRO-3 come last, because
transformers goes on building in shards while a model of theirs is alive.
"""

from __future__ import annotations

import sys
from pathlib import Path

from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.pdeath import die_with_parent
from llmtop.trainer.worker.malloc import return_freed_memory
from llmtop.trainer.worker.place import place_from_environment
from llmtop.trainer.worker.process_group import join_process_group, leave_process_group
from llmtop.trainer.worker.session import import_libraries, train_in_group
from llmtop.trainer.worker.stages import StageLog
from llmtop.trainer.worker.stopping import StopRequest


def main(folders: list[str]) -> None:
    die_with_parent()
    return_freed_memory()
    runs = [RunDir.open(Path(folder)) for folder in folders]
    place = place_from_environment()
    for run in runs:
        import_libraries(run.spec())
    device = join_process_group(place, on_cpu=True)
    for run in runs:
        with EventWriter(run.events_path(place.source), place.source) as events:
            train_in_group(run, place, device, events, StageLog(events), StopRequest())
    leave_process_group(device)


if __name__ == "__main__":
    main(sys.argv[1:])

"""One rank of a run: `python -m llmtop.trainer.worker RUNDIR`, started by the supervisor."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.oom.failure import failure_event
from llmtop.profiler.record.patientlog import PatientWriter
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.standby import mark_ready, standby_setting, wait_for_go
from llmtop.trainer.pdeath import die_with_parent
from llmtop.trainer.stacks import listen_for_stacks
from llmtop.trainer.worker.failure import exit_code, words_for_the_log
from llmtop.trainer.worker.malloc import return_freed_memory
from llmtop.trainer.worker.place import place_from_environment
from llmtop.trainer.worker.stages import StageLog
from llmtop.trainer.worker.stopping import StopRequest
from llmtop.trainer.worker.streams import forgive_full_disk

_FAILURE_SETTLES_SECONDS, _END_SETTLES_SECONDS = 3.0, 60.0
"""How long the last events of a rank wait for room on a full disk: after a failure the others wait for it."""


def main(arguments: list[str]) -> NoReturn:
    die_with_parent()
    forgive_full_disk()
    stop = StopRequest()
    stop.listen()
    if len(arguments) != 1:
        raise UsageError("the worker takes one argument, the run directory")
    run = RunDir.open(Path(arguments[0]))
    place = place_from_environment()
    setting = standby_setting()
    if setting is not None:
        _stand_by(run, setting, place.rank)
    listen_for_stacks(run, place.rank)
    events = PatientWriter(run.events_path(place.source), place.source)
    stages = StageLog(events)
    try:
        if setting is None or not run.spec().on_cpu:
            # Who stood by beside ranks on a device has some of it still to load.
            with stages("import"):
                _import(run.spec())
        from llmtop.trainer.worker.session import train

        train(run, place, events, stages, stop)
    except Exception as error:  # noqa: BLE001 - told in full, in the event or the log
        events.write(failure_event(error, stages))
        sys.stderr.write(words_for_the_log(error, run.run_id))
        events.settle(_FAILURE_SETTLES_SECONDS)
        _leave(exit_code(error))
    events.settle(_END_SETTLES_SECONDS)
    _leave(0)


def _import(spec: RunSpec, *, off_device: bool = False) -> None:
    if spec.on_cpu:
        return_freed_memory()
    from llmtop.trainer.worker.session import import_libraries

    import_libraries(spec, off_device=off_device)


def _stand_by(run: RunDir, setting: int, rank: int) -> None:
    """Import what the setting needs, then wait until the ranks that train now have left.

    Their event logs are not this process's to write yet: its failure is in its text log alone.
    """
    try:
        spec = run.spec(setting)
        _import(spec, off_device=not spec.on_cpu)
    except Exception as error:  # noqa: BLE001 - told in the log
        sys.stderr.write(words_for_the_log(error, run.run_id))
        _leave(exit_code(error))
    mark_ready(run, setting, rank)
    wait_for_go(run, setting)


def _leave(code: int) -> NoReturn:
    """End without the interpreter's clean-up, which destroys process groups.

    After a failure their other members may still be inside a collective, and that can hang; after
    success gloo's threads can abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])

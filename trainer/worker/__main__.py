"""One rank of a run: `python -m llmtop.trainer.worker RUNDIR`, started by the supervisor."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.eventlog import EventWriter
from llmtop.profiler.rundir import RunDir
from llmtop.trainer.pdeath import die_with_parent
from llmtop.trainer.stacks import listen_for_stacks
from llmtop.trainer.worker.failure import exit_code, failure_event
from llmtop.trainer.worker.malloc import return_freed_memory
from llmtop.trainer.worker.place import place_from_environment
from llmtop.trainer.worker.stages import StageLog
from llmtop.trainer.worker.stopping import StopRequest


def main(arguments: list[str]) -> NoReturn:
    die_with_parent()
    stop = StopRequest()
    stop.listen()
    if len(arguments) != 1:
        raise UsageError("the worker takes one argument, the run directory")
    run = RunDir.open(Path(arguments[0]))
    place = place_from_environment()
    listen_for_stacks(run, place.rank)
    events = EventWriter(run.events_path(place.source), place.source)
    stages = StageLog(events)
    try:
        with stages("import"):
            spec = run.spec()
            if spec.on_cpu:
                return_freed_memory()
            from llmtop.trainer.worker.session import import_libraries, train

            import_libraries(spec)
        train(run, place, events, stages, stop)
    except Exception as error:  # noqa: BLE001 - shown in full by _show
        events.write(failure_event(error, stage=stages.current, step=stages.step))
        _show(error)
        _leave(exit_code(error))
    _leave(0)


def _show(error: BaseException) -> None:
    """In the rank's log: a person's mistake in words, anything else with its traceback."""
    if isinstance(error, LlmtopError):
        sys.stderr.write(f"{error}\n")
    else:
        traceback.print_exception(error)


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

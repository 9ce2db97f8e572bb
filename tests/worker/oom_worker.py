"""A rank that is like any other, but for the out-of-memory errors that its run's `plants.json` names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.standby import standby_setting
from llmtop.trainer.worker import __main__ as worker
from llmtop.trainer.worker import session
from llmtop.trainer.worker.place import place_from_environment
from llmtop.trainer.worker.stages import StageLog
from tests.worker.healing_ranks import PLANTS, Plants


def plant(run: RunDir) -> None:
    build, made = session.build_engine, StageLog
    stages: list[StageLog] = []

    def remembered(*given: Any) -> StageLog:
        stages.append(made(*given))
        return stages[-1]

    def planted(*given: Any) -> Any:
        plants = json.loads((run.path / PLANTS).read_text())
        return Plants(plants, place_from_environment(), stages[-1]).into(build(*given))

    setattr(worker, "StageLog", remembered)  # noqa: B010 - the module exports it to nobody else
    setattr(session, "build_engine", planted)  # noqa: B010


if __name__ == "__main__":
    run = RunDir.open(Path(sys.argv[1]))
    assert standby_setting() is None
    plant(run)
    worker.main(sys.argv[1:])

"""G5 after a calibration: rows of `benchmarks.calibration` on a GPU, predicted anew by their own figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.session import RESULTS
from llmtop.presets.spec import MachineFigures
from llmtop.profiler.cost.steptime import predict_step_seconds
from llmtop.tui.commandline import options
from llmtop.tui.commandline.arguments import CommandParser

ROWS = RESULTS / "calibration_h200.jsonl"
MEAN_GOAL, P95_GOAL = 5.0, 12.0


class CalibratedRun(Struct, frozen=True, kw_only=True):
    options: str
    """As they were typed."""
    measured_seconds: float
    """Of a step, the middle one of the run."""
    preset_percent: float
    """Error of today's prediction without the calibration."""
    percent: float
    """And with it."""


def calibrated_runs(path: Path = ROWS) -> Iterator[CalibratedRun]:
    parser = CommandParser("calibrate", "", "calibrate", "calibrate")
    options.add_run_arguments(parser)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        spec = options.resolve_run(parser.parse_args([*row["options"].split(), "--gpu", row["gpu"]]))
        figures = msgspec.convert(row["calibration"]["figures"], MachineFigures)
        measured = row["measured_seconds"]
        errors = []
        for one in (spec, replace(spec, gpu=replace(spec.gpu, measured=figures))):
            predicted = predict_step_seconds(one)
            assert predicted is not None, row["options"]
            errors.append(100 * (predicted / measured - 1))
        before, after = errors
        yield CalibratedRun(
            options=row["options"], measured_seconds=measured, preset_percent=before, percent=after
        )

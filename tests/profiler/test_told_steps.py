"""Of how many steps the phases are, where not every step tells them, as on a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llmtop.profiler.export.secrets import Scrubber
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.page import run_page
from llmtop.profiler.report.pagedata import read_page
from llmtop.profiler.report.text import render
from tests.recorded import make_recorded_run


def thin_phases(run: RunDir) -> None:
    """After the first 20 steps one of five tells its phases."""
    for path in run.path.rglob("*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for event in events:
            if "step_finished" in event.values() and event["step"] > 20 and event["step"] % 5:
                event["phase_seconds"] = {}
        path.write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.parametrize("thinned", [False, True])
def test_report_and_page_say_of_how_many_steps_the_phases_are(tmp_path: Path, thinned: bool) -> None:
    run = make_recorded_run(tmp_path, kind="cuda", steps=60)
    if thinned:
        thin_phases(run)
    report = build_report(run)
    told, untold = report.phase_steps, report.untold_phase_steps
    assert (told, untold) == ((26, 32) if thinned else (58, 0))
    text = re.sub(r"\s+", " ", render(report, 200))
    page = run_page(read_page(run, Scrubber()))
    words = f"means of {told} of {told + untold} steps after the first 2"
    assert (words in text) == (f"Phases: {words}." in page) == thinned
    assert ("Phases: means over the steps after the first 2." in page) != thinned

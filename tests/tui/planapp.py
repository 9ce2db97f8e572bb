"""What the tests of the plan share: the app on its plan, and how a person edits it."""

from __future__ import annotations

from pathlib import Path

from textual.pilot import Pilot

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.widgets.editor import Entry
from llmtop.tui.widgets.planrows import PlanRows
from tests.tui.tuiruns import MACHINE

SMALL = (80, 24)
Launched = list[tuple[RunSpec, Prediction]]


def plan_app(root: Path, launched: Launched | None = None, recipe: str = "test-8b") -> LlmtopApp:
    """The app on its plan, on a machine that is made up; a launch makes the folder and starts nothing."""

    def launcher(spec: RunSpec, prediction: Prediction, where: Path, visible: str) -> RunDir:
        if launched is not None:
            launched.append((spec, prediction))
        run = RunDir.create(where, spec, prediction, {})
        run.write_supervisor_pid()
        return run

    return LlmtopApp("plan", root=root, recipe=recipe, deeds=Deeds(detect=lambda: MACHINE, launch=launcher))


def cursor_to(app: LlmtopApp, key: str) -> None:
    """Put the cursor on the row of an option; that arrows reach each one is a test of its own."""
    rows = app.screen.query_one(PlanRows)
    rows.highlighted = rows.get_option_index(key)


async def type_in(app: LlmtopApp, pilot: Pilot[int], text: str) -> None:
    """As pasted: a long text by single keys takes seconds."""
    await pilot.press("enter")
    app.screen.query_one(Entry).value = text
    await pilot.press("enter")

"""Pictures of the app as SVG, made by the app itself without a terminal: for the README and for reports."""

from __future__ import annotations

import asyncio
from pathlib import Path

from llmtop.presets.errors import LlmtopError
from llmtop.presets.resolve import Machine
from llmtop.profiler.hardware.gpuuse import GpusInUse
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.app import LlmtopApp, Start
from llmtop.tui.asking.deeds import Deeds

_ROUNDS = 400
_ROUND_SECONDS = 0.05


def write_monitor_svg(run: RunDir, path: Path, *, columns: int = 100, rows: int = 30) -> None:
    """Write what the monitor shows of a run at this moment."""
    path.write_text(asyncio.run(_picture("monitor", run, None, (columns, rows))), encoding="utf-8")


def write_plan_svg(
    recipe: str, path: Path, *, columns: int = 100, rows: int = 30, machine: Machine | None = None
) -> None:
    """Write what the plan shows of a recipe, on this machine or on another."""
    deeds = Deeds() if machine is None else Deeds(detect=lambda: machine, gpus=GpusInUse)
    path.write_text(asyncio.run(_picture("plan", None, recipe, (columns, rows), deeds)), encoding="utf-8")


async def _picture(
    start: Start, run: RunDir | None, recipe: str | None, size: tuple[int, int], deeds: Deeds | None = None
) -> str:
    app = LlmtopApp(start, run, run.path.parent if run is not None else None, recipe, deeds=deeds)
    async with app.run_test(size=size) as pilot:
        for _ in range(_ROUNDS):
            await pilot.pause(_ROUND_SECONDS)
            if app.settled:
                # Once more, for what the newest message has only asked to be painted.
                await pilot.pause(_ROUND_SECONDS)
                return app.export_screenshot(title="llmtop")
    raise LlmtopError(f"the {start} screen showed nothing", why="its data did not come in time")

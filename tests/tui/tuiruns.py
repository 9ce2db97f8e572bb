"""What the tests of the app share: a run that they play step by step, and the screen as text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.app import App
from textual.pilot import Pilot

from llmtop.presets.resolve import Machine
from llmtop.profiler.record.checkpointevents import CheckpointLoaded
from llmtop.profiler.record.events import RunEnded
from llmtop.profiler.record.rundir import RunDir
from tests.recorded import BEGAN, Recorder
from tests.recorded_spec import GIB, Kind, recorded_prediction, recorded_spec

MACHINE = Machine(gpu="cpu", gpus=2, host_memory_bytes=24 * GIB)
WAIT_ROUNDS = 2000
ROUND_SECONDS = 0.02
SETTLE_ROUNDS = 20
"""A clock or a row that moves never stands still."""


def save_step(run: RunDir, step: int) -> None:
    """A checkpoint of so many steps, as far as its marker tells."""
    folder = run.checkpoints_dir / f"step-{step}"
    folder.mkdir(parents=True)
    marker = {"step": step, "position": {}, "world_size": run.spec().world_size}
    (folder / "llmtop.json").write_text(json.dumps(marker))


class LiveRun:
    """A run that goes on, with this process for its supervisor."""

    def __init__(
        self, root: Path, *, kind: Kind = "cpu", ranks: int = 2, began: float = BEGAN, **options: Any
    ) -> None:
        self.spec = recorded_spec(kind, ranks=ranks, **options)
        self.run = RunDir.create(root, self.spec, recorded_prediction(self.spec), {})
        self.run.write_supervisor_pid()
        self.recorder = Recorder(self.run, self.spec, began)

    def start(self) -> None:
        self.recorder.start()

    def steps(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            self.recorder.step(number)

    def save(self, step: int) -> None:
        """A checkpoint of so many steps, as far as its marker tells."""
        save_step(self.run, step)

    def log(self, rank: int, text: str) -> None:
        with self.run.log_path(rank).open("a", encoding="utf-8") as file:
            file.write(text)

    def end(self, state: str, reason: str, fix: str = "", rank: int | None = None) -> None:
        end = RunEnded(state=state, reason=reason, fix=fix, rank=rank)  # type: ignore[arg-type]
        self.recorder.supervisor.write(end)

    def go_on(self, after: int | None = None) -> None:
        """After its end, in new processes; they have not told from where, and their supervisor has only where
        it found a state."""
        self.recorder.time.advance(60.0)
        self.recorder.start(goes_on_after=after)

    def load(self, step: int) -> None:
        """The new processes go on from the checkpoint of that step."""
        loaded = CheckpointLoaded(
            step=step,
            path=f"step-{step}",
            bytes_read=1,
            seconds=1.0,
            zero=self.spec.options.zero,
            world_size=self.spec.world_size,
        )
        for writer in self.recorder.ranks:
            writer.write(loaded)

    def close(self) -> None:
        self.recorder.close()


def on_a_small_host(root: Path, monkeypatch: pytest.MonkeyPatch) -> LiveRun:
    """Four steps of a run on GPUs, where host memory is short for any offload."""
    monkeypatch.setattr("llmtop.tui.asking.changetext.host_memory_bytes", lambda: 64 << 20)
    live = LiveRun(root, kind="cuda")
    live.start()
    live.steps(1, 4)
    return live


def screen_text(app: App[Any]) -> str:
    """What the terminal shows, row by row."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


async def wait_for(
    pilot: Pilot[Any], condition: Callable[[], bool], what: str = "", *, rounds: int = WAIT_ROUNDS
) -> None:
    """Until the condition holds; fails with the screen when it never does."""
    for _ in range(rounds):
        if condition():
            return
        await asyncio.sleep(ROUND_SECONDS)
    raise AssertionError(f"never came: {what}\n{screen_text(pilot.app)}")


async def without_notes(pilot: Pilot[Any]) -> None:
    """Until no note lies over the screen: Esc takes notes away before anything else."""
    pilot.app.clear_notifications()
    await wait_for(pilot, lambda: not pilot.app.screen.query("Toast"), "no note")


async def wait_for_text(pilot: Pilot[Any], *words: str, rounds: int = WAIT_ROUNDS) -> str:
    """Until all the words stand on the screen; the screen once it stands still."""
    told = " and ".join(words)
    await wait_for(pilot, lambda: all(word in screen_text(pilot.app) for word in words), told, rounds=rounds)
    # The footer and what else follows from the same message are painted a moment later.
    shown = ""
    for _ in range(SETTLE_ROUNDS):
        before, shown = shown, screen_text(pilot.app)
        if shown == before:
            break
        await pilot.pause()
    return shown

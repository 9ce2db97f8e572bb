"""The plan of a model whose code is traced first: the screen goes on, and the answer comes by itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtop.presets.catalog import load_model
from llmtop.presets.hf import tracing
from llmtop.tui.screens.plan import PlanScreen
from tests.tui.planapp import SMALL, cursor_to, plan_app, type_in
from tests.tui.tuiruns import wait_for_text

Tracer = Callable[[str], tracing.Answer]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of an architecture without formulas, that has not been traced."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tracing, "_answers", {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "persimmon", "hidden_size": 64, "vocab_size": 500}))
    return path


def answering(monkeypatch: pytest.MonkeyPatch, answer: tracing.Answer) -> threading.Event:
    """The tracing process says nothing until the event is set."""
    may_answer = threading.Event()

    def traced(config: str) -> tracing.Answer:
        assert may_answer.wait(60)
        return answer

    monkeypatch.setattr(tracing, "_traced", traced)
    return may_answer


async def test_the_screen_answers_keys_while_a_model_is_traced(
    root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = load_model("llama-3.2-1b").shape
    may_answer = answering(monkeypatch, tracing.Answer(shape=shape))
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits", "8.03B")
        cursor_to(app, "model")
        await type_in(app, pilot, str(model))
        await wait_for_text(pilot, "'persimmon' is being traced", "5 to 20", "… tracing")
        await pilot.press("up")
        assert isinstance(app.screen, PlanScreen) and app.screen.plan is not None and app.screen.plan.waits
        may_answer.set()
        await wait_for_text(pilot, "✓ fits", "1.24B")


async def test_why_a_model_cannot_be_traced_is_told(
    root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, tracing.Answer(refused="its code asks for data")).set()
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "model")
        await type_in(app, pilot, str(model))
        await wait_for_text(pilot, "✗ not valid", "its code asks")


async def test_an_answer_that_comes_late_does_not_change_another_plan(
    root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer = answering(monkeypatch, tracing.Answer(refused="too late"))
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "model")
        await type_in(app, pilot, str(model))
        await wait_for_text(pilot, "is being traced")
        await pilot.press("backspace")
        await wait_for_text(pilot, "✓ fits", "8.03B")
        may_answer.set()
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "✓ fits" in await wait_for_text(pilot, "8.03B")

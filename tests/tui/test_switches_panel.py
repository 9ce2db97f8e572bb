"""The panel of switches: read when it is opened, and never before."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtop.profiler.effects import switches
from llmtop.profiler.record.events import KernelsSeen
from llmtop.tui.app import LlmtopApp
from llmtop.tui.widgets.painted import Painted
from tests.recorded import make_recorded_run
from tests.tui.tuiruns import wait_for_text


@pytest.mark.parametrize("size", [(80, 24), (120, 30), (60, 20)])
async def test_the_key_opens_it_with_what_was_measured(root: Path, size: tuple[int, int]) -> None:
    other = make_recorded_run(root, kind="cuda", attention="eager", pace=2.0)
    seen = KernelsSeen(step=3, attention="sdpa_flash", attention_calls=32, optimizer="deepspeed_fused_adam")
    run = make_recorded_run(root, kind="cuda", kernels=seen)
    app = LlmtopApp("monitor", run, root)
    async with app.run_test(size=size) as pilot:
        await wait_for_text(pilot, "60/60")
        await pilot.press("w")
        shown = await wait_for_text(pilot, "Switches", "-50", "attention")
        assert "✓ attention" in shown and "✓ ZeRO" in shown and "stage 2" in shown
        if size[0] >= 80:
            assert f"eager, run {other.run_id[-4:]}" in shown
            assert "ran: torch's FlashAttention-2 (SDPA)" in shown
        await pilot.press("w")
        await wait_for_text(pilot, "1 Memory")


async def test_other_runs_are_not_read_before_it_is_opened(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def read_others(run: object, host: str) -> tuple[()]:
        reads.append(host)
        return ()

    monkeypatch.setattr(switches, "read_others", read_others)
    app = LlmtopApp("monitor", make_recorded_run(root), root)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "60/60")
        assert reads == []
        await pilot.press("w")
        await wait_for_text(pilot, "no run differs in it alone")
        assert reads == ["testhost"]


@pytest.mark.parametrize("size", [(80, 24), (60, 18)])
async def test_nothing_is_cut_and_marks_are_told(root: Path, size: tuple[int, int]) -> None:
    other = make_recorded_run(root, kind="cuda", attention="eager", pace=2.0)
    seen = KernelsSeen(step=3, attention="sdpa_flash", attention_calls=32, optimizer="deepspeed_fused_adam")
    run = make_recorded_run(root, kind="cuda", kernels=seen)
    app = LlmtopApp("monitor", run, root)
    async with app.run_test(size=size) as pilot:
        await wait_for_text(pilot, "60/60")
        await pilot.press("w")
        await wait_for_text(pilot, "-50")
        body = app.screen.query_one("#switches Painted", Painted)
        told = " ".join(str(body.painted).split())
        assert "…" not in told and f"run {other.run_id}" in told
        assert "· Liger" in told and "✓ Liger" not in told
        await pilot.press("end")
        await wait_for_text(pilot, "✓ on", "✗ not as asked for", "? nothing tells", "· off")

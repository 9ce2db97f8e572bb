"""The monitor: follows the record, opens panels by key, and says how a run ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtop.profiler.record.events import (
    Compiling,
    MemoryClassified,
    PhaseMemory,
    RankExited,
    StageBegan,
    StageFinished,
    StepFinished,
)
from llmtop.profiler.record.feed import read_state
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.feeds.runsfeed import run_row
from llmtop.tui.screens.monitor import all_panels
from llmtop.tui.screens.runs import RunsScreen
from llmtop.tui.widgets.panel import Panel
from tests.recorded import make_recorded_run
from tests.recorded_spec import GIB, Kind
from tests.tui.tuiruns import LiveRun, screen_text, wait_for, wait_for_text

SMALL = (80, 24)


async def test_everything_important_stands_on_80x24(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        shown = await wait_for_text(pilot, "20/60", "running")
        for words in ("cpu-demo", "tiny-llama", "2 x cpu", "ZeRO-2", "rank0", "rank1", "predicted", "actual"):
            assert words in shown
        for words in ("tok/s", "fwd 33%", "RAM", "cgroup", "NVLink  n/a", "step 20 loss", "left", "elapsed"):
            assert words in shown
        for panel in app.screen.query(Panel):
            assert panel.TITLE in shown or not panel.display
        assert "Quit (run goes on)" in shown and "Stop" in shown and "Help" in shown


async def test_follows_what_is_appended(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "20/60")
        live.steps(21, 25)
        await wait_for_text(pilot, "25/60", "step 25 loss")


async def test_says_how_and_why_a_run_ended(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "20/60")
        live.end("failed", "\x1b[31mrank 1 was killed by SIGKILL [/b]\x1b[0m", "see the kernel log")
        shown = await wait_for_text(
            pilot,
            *("FAILED: rank 1 was killed by SIGKILL [/b]", "fix: see the kernel log"),
            *("peak predicted", "actual"),
        )
        assert "\x1b" not in shown
        await wait_for(pilot, lambda: "Stop" not in screen_text(app).splitlines()[-1])
        await wait_for(pilot, lambda: "run goes on" not in screen_text(app))
        await pilot.press("q")
    assert app.return_value == 4


@pytest.mark.parametrize(("end", "code"), [("completed", 0), ("stopped", 0), ("out_of_memory", 5)])
async def test_exit_code_is_that_of_the_run(end: str, code: int, root: Path) -> None:
    run = make_recorded_run(root, end=end, steps=6)  # type: ignore[arg-type]
    app = LlmtopApp("monitor", run, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, end.replace("_", " ").upper())
        await pilot.press("q")
    assert app.return_value == code


async def test_leaving_a_live_run_says_that_it_goes_on(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "20/60")
        await pilot.press("q")
    assert app.return_value == 0
    assert app.farewell == f"The run goes on.\nSee it again: llmtop attach {live.run.run_id}"


async def test_a_run_without_supervisor_is_lost(root: Path) -> None:
    run = make_recorded_run(root, end=None, steps=5)
    run.supervisor_pid_path.write_text('{"pid": 999999999, "started_ticks": 1}')
    app = LlmtopApp("monitor", run, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "? lost", "supervisor is gone")


async def test_start_up_is_a_timeline(root: Path) -> None:
    live = LiveRun(root)
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "starting", "waiting for the first rank")
        for rank, writer in enumerate(live.recorder.ranks):
            writer.write(StageBegan(stage="import"))
            live.recorder.time.advance(2.5)
            if rank == 0:
                writer.write(StageFinished(stage="import", seconds=2.5))
                writer.write(StageBegan(stage="process_group"))
        await wait_for_text(pilot, "▸ import torch and DeepSpeed", "rank 1")
        live.recorder.ranks[1].write(StageFinished(stage="import", seconds=5.0))
        await wait_for_text(pilot, "✓ import torch and DeepSpeed   5.00 s", "▸ join the ranks")
    live.close()


async def test_each_panel_opens_over_the_screen_and_closes_again(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "20/60")
        for name, kind in all_panels():
            await pilot.press(kind.KEY)
            shown = await wait_for_text(pilot, f" {kind.KEY} {kind.TITLE}")
            others = [other.TITLE for _, other in all_panels() if other is not kind]
            titles = [line for line in shown.splitlines() if any(f" {title} " in line for title in others)]
            assert not [line for line in titles if line.lstrip().startswith(("─", "━"))], name
            await pilot.press("escape")
            await wait_for_text(pilot, "1 Memory", "8 Log")


async def test_zoomed_panels_tell_more(root: Path) -> None:
    run = make_recorded_run(root, kind="cuda", ranks=8, steps=12, end=None)
    app = LlmtopApp("monitor", run, root)
    async with app.run_test(size=(80, 30)) as pilot:
        await wait_for_text(pilot, "12/12", "G7")
        for key, words in {
            "1": ("GPU0", "this run", "┼ device predicted"),
            "2": ("parameters", "CUDA context", "unexplained", "predicted P"),
            "3": ("learning rate", "gradient norm", "weights   random", "tokenizer made from the data"),
            "0": ("weights   random", "data      builtin:english", "tokenizer made from the data"),
            "4": ("backward", "slowest rank", "step seconds"),
            "5": ("swap", "peak RSS", "no offload"),
            "6": ("NVLink send", "GPU7", "PCIe recv", "GPU4    PCIe gen5 x16 of gen5 x16"),
            "9": ("GPU0  NVIDIA H200", "tensor", "612/700 W", "throttled: no", "J a token", "Xid: none"),
        }.items():
            await pilot.press(key)
            await wait_for_text(pilot, *words)
            await pilot.press("escape")


async def test_log_is_harmless_and_switches_between_ranks(live: LiveRun, root: Path) -> None:
    live.log(0, "\x1b[31mred\x1b[0m \x1b]0;title\x07[bold]kept[/bold] [/nope]\a\n10%\r50%\r100% done\n")
    live.log(1, "this is rank one\n")
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "100% done")
        await pilot.press("l")
        shown = await wait_for_text(pilot, "red [bold]kept[/bold] [/nope]", "100% done")
        assert "\x1b" not in shown and "50%" not in shown and "title" not in shown
        await pilot.press("right")
        await wait_for_text(pilot, "this is rank one", "8 Log  rank 1")
        await pilot.press("right")
        await wait_for_text(pilot, "8 Log  supervisor", "supervisor has written nothing yet")


async def test_the_log_of_the_rank_at_fault_is_shown(live: LiveRun, root: Path) -> None:
    live.log(0, "connection closed by peer\n")
    live.log(1, "out of luck\n")
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        await pilot.press("l")
        await wait_for_text(pilot, "8 Log  rank 0", "connection closed by peer")
        for rank, signal in ((0, "SIGABRT"), (1, "SIGKILL")):
            live.recorder.time.advance(1.0)
            live.recorder.supervisor.write(RankExited(rank=rank, pid=live.recorder.pid(rank), signal=signal))
        live.end("failed", "rank 1 was killed by SIGKILL", rank=1)
        await wait_for_text(pilot, "8 Log  rank 1", "out of luck")


async def test_an_empty_log_says_so_and_where_the_steps_are(root: Path) -> None:
    app = LlmtopApp("monitor", make_recorded_run(root, steps=4), root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "COMPLETED")
        app.screen.run.log_path(1).write_text("")  # type: ignore[attr-defined]
        await pilot.press("l", "right")
        await wait_for_text(pilot, "8 Log  rank 1", "rank 1 wrote nothing; the steps are in")


async def test_log_follows_its_end_until_scrolled(live: LiveRun, root: Path) -> None:
    live.log(0, "".join(f"line {number}\n" for number in range(200)))
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "line 199")
        await pilot.press("l")
        await wait_for(pilot, lambda: "line 199" in screen_text(app) and "line 185" in screen_text(app))
        live.log(0, "newest\n")
        await wait_for_text(pilot, "newest")
        await pilot.press("home")
        await wait_for_text(pilot, "step 1 loss")
        live.log(0, "newer still\n")
        await wait_for_text(pilot, "223 lines")
        assert "newer still" not in screen_text(app)
        await pilot.press("f")
        await wait_for_text(pilot, "newer still")


async def test_nothing_new_paints_nothing(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "20/60", "step 20 loss")
        panels = {panel.id: panel._body for panel in app.screen.query(Panel)}
        before = {name: body.painted for name, body in panels.items()}
        view = app.screen.view  # type: ignore[attr-defined]
        live.log(1, "a log that is not shown\n")
        app.screen.view = None  # type: ignore[attr-defined]
        app.screen.view = view  # type: ignore[attr-defined]
        await pilot.pause()
        assert {name: body.painted for name, body in panels.items()} == before
        assert all(panels[name].painted is before[name] for name in panels)


@pytest.mark.parametrize("size", [(40, 12), (20, 5), (150, 45)])
async def test_any_terminal_size(size: tuple[int, int], live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=size) as pilot:
        await wait_for(pilot, lambda: app.screen.view is not None)  # type: ignore[attr-defined]
        for key in ("1", "2", "3", "4", "5", "6", "7", "8", "9", "escape", "tab", "down"):
            await pilot.press(key)
        await pilot.pause()
        assert screen_text(app)


async def test_stop_asks_and_requests(live: LiveRun, root: Path) -> None:
    asked: list[tuple[str, bool]] = []
    app = LlmtopApp(
        "monitor", live.run, root, deeds=Deeds(stop=lambda run, save: asked.append((run.run_id, save)))
    )
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "20/60")
        await pilot.press("s")
        await wait_for_text(pilot, "Stop this run?", "save a checkpoint", "Esc  go back, the run goes on")
        await pilot.press("escape")
        await wait_for(pilot, lambda: "Stop this run?" not in screen_text(app))
        assert asked == []
        await pilot.press("s", "s", "s")
        await wait_for_text(pilot, "Stop this run?")
        assert asked == []
        await pilot.press("enter")
        await wait_for(pilot, lambda: "Stop this run?" not in screen_text(app))
        assert asked == []
        await pilot.press("s", "c")
        await wait_for(pilot, lambda: asked == [(live.run.run_id, True)])
        await wait_for_text(pilot, "Stop requested")
        await pilot.press("s", "up", "enter")
        await wait_for(pilot, lambda: len(asked) == 2)
    assert asked[1] == (live.run.run_id, False)


async def test_a_refused_stop_is_shown(live: LiveRun, root: Path) -> None:
    refusal = "the run is stopping already, without a checkpoint"
    app = LlmtopApp("monitor", live.run, root, deeds=Deeds(stop=lambda run, save: refusal))
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "20/60")
        await pilot.press("s")
        await wait_for_text(pilot, "Stop this run?")
        await pilot.press("c")
        await wait_for_text(pilot, "Stop refused", "stopping already")
        assert "Stop requested" not in screen_text(app)


async def test_control_c_ends_nothing_and_says_what_does(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "20/60")
        await pilot.press("ctrl+c")
        await wait_for_text(pilot, "The run goes on", "q leaves, s stops the run")
        await pilot.press("r")
        await wait_for(pilot, lambda: isinstance(app.screen, RunsScreen))
        await wait_for(pilot, lambda: "The run goes on" not in screen_text(app))
        assert not app._notifications


async def test_control_c_where_no_run_is_watched(root: Path) -> None:
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "No runs in")
        await pilot.press("ctrl+c", "ctrl+c")
        shown = await wait_for_text(pilot, "q leaves llmtop.", "Runs go on without it.")
        assert shown.count("q leaves") == 1


def titles(app: LlmtopApp) -> list[str]:
    """The rows of a screen on which panels have their titles."""
    return [line for line in screen_text(app).splitlines() if line.lstrip().startswith(("─", "━"))]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("width", [64, 80, 100, 130, 200])
async def test_no_title_is_cut(kind: Kind, width: int, root: Path) -> None:
    run = make_recorded_run(root, kind=kind, steps=12, end=None)
    app = LlmtopApp("monitor", run, root)
    async with app.run_test(size=(width, 24)) as pilot:
        shown = await wait_for_text(pilot, "12/12", "2 Predicted/actual")
        assert titles(app) and not [line for line in titles(app) if "…" in line], shown


@pytest.mark.parametrize(
    ("kind", "words"), [("cuda", ("by PaLM's count", "by needed products")), ("cpu", ("MFU n/a",))]
)
async def test_the_steps_panel_says_the_utilisation(kind: Kind, words: tuple[str, ...], root: Path) -> None:
    run = make_recorded_run(root, kind=kind, steps=12, end=None)
    app = LlmtopApp("monitor", run, root)
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_for_text(pilot, "12/12")
        await pilot.press("4")
        await wait_for_text(pilot, *words)


async def test_peaks_agree_between_panels(live: LiveRun, root: Path) -> None:
    """The newest sample comes before the step in which a rank reached its peak."""
    reached = 2 * GIB
    memory = {"forward": PhaseMemory(peak_bytes=reached)}
    for rank in live.recorder.ranks:
        rank.write(StepFinished(step=21, loss=2.0, step_seconds=0.4, phase_memory=memory))
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        shown = await wait_for_text(pilot, "21/60", "peak 2.00 GiB")
        assert shown.count("2.00 GiB") == 3
        await pilot.press("5")
        shown = await wait_for_text(pilot, "peak RSS")
        assert shown.count("2.00 GiB") == 2
    row = run_row(live.run, read_state(live.run))
    assert row.memory_bytes == reached


async def test_reclaimed_pages_make_no_number(live: LiveRun, root: Path) -> None:
    for rank in live.recorder.ranks:
        parts = {"parameters": 4 * GIB}
        rank.write(MemoryClassified(step=20, moment="end_of_forward", components=parts, total_bytes=5 * GIB))
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "20/60", "not reliable", "! actual memory is not reliable")
        await pilot.press("2")
        shown = await wait_for_text(pilot, "swapped or reclaimed pages")
        row = next(line for line in shown.splitlines() if "? unexplained" in line)
        assert row.split()[2:] == ["n/a", "n/a"]


async def test_findings_are_told_whole_where_there_is_room(live: LiveRun, root: Path) -> None:
    live.recorder.supervisor.write(Compiling(what="cpu_adam"))
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=(150, 50)) as pilot:
        await wait_for_text(pilot, "cpu_adam is being compiled", "wait; the next run finds it built")


async def test_skipped_steps_and_the_loss_scale_stand_with_the_steps(root: Path) -> None:
    live = LiveRun(root, kind="cuda", ranks=1, precision="fp16")
    live.start()
    live.steps(1, 2)
    for step, scale in ((3, 65536.0), (4, 32768.0)):
        live.recorder.ranks[0].write(
            StepFinished(step=step, loss=2.0, loss_scale=scale, skipped=step == 4, step_seconds=0.5)
        )
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_for_text(pilot, "1 of 4 steps skipped, loss scale 32,768")
        await pilot.press("4")
        await wait_for_text(pilot, "Steps", "1 of 4 steps skipped, loss scale 32,768", "backward")
    live.close()

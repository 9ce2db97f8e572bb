"""The list of runs as a tool: filter, order, compare and delete, by keys and by mouse, with many runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from textual.widgets import DataTable

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.rundir import RunDir, find_run, list_runs
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking import deletion
from llmtop.tui.feeds.view import RunRow
from llmtop.tui.screens.monitor import MonitorScreen
from llmtop.tui.screens.runs import RunsScreen
from llmtop.tui.widgets.columns import Order
from llmtop.tui.widgets.runcolumns import COLUMNS, holds, ordered
from tests.cli.conftest import Llmtop, llmtop, runs_root  # noqa: F401 - fixtures
from tests.recorded import make_recorded_run
from tests.tui.tuiruns import LiveRun, screen_text, wait_for, wait_for_text, without_notes

SMALL = (80, 24)


def shown(app: LlmtopApp) -> list[str]:
    screen = app.screen
    assert isinstance(screen, RunsScreen)
    return [row.run_id for row in screen.shown]


def ids_on_screen(app: LlmtopApp) -> list[str]:
    """The first cells of the table's rows."""
    rows = [line.strip() for line in screen_text(app).splitlines()]
    return [row[:4] for row in rows if re.match(r"[0-9a-f]{4}[ *]", row)]


async def test_the_filter_narrows_while_typing_and_escape_ends_it(live: LiveRun, root: Path) -> None:
    other = make_recorded_run(root, kind="cuda", steps=4)
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "● running", "✓ completed")
        await pilot.press("slash", *"completed")
        await wait_for_text(pilot, "1 of 2")
        assert shown(app) == [other.run_id]
        await pilot.press("enter", "slash", *" q")
        await wait_for_text(pilot, "No run holds these words")
        await pilot.press("escape")
        await wait_for(pilot, lambda: len(shown(app)) == 2)
        await wait_for(pilot, lambda: "No run holds" not in screen_text(app))


async def test_rows_are_ordered_by_keys_and_by_mouse(root: Path) -> None:
    runs = [make_recorded_run(root, steps=steps) for steps in (5, 9, 3)]
    app = LlmtopApp("runs", root=root)
    by_steps = [runs[1].run_id, runs[0].run_id, runs[2].run_id]
    newest = [run.run_id for run in list_runs(root)]
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "5/5", "9/9", "3/3")
        assert shown(app) == newest
        while "step▾" not in screen_text(app):
            await pilot.press("o")
        assert shown(app) == by_steps
        assert ids_on_screen(app) == [run_id[-4:] for run_id in by_steps]
        await pilot.press("O")
        await wait_for_text(pilot, "step▴")
        assert shown(app) == by_steps[::-1]
        await pilot.press("escape")
        await wait_for(pilot, lambda: shown(app) == newest)
        at = screen_text(app).splitlines()[1].index("step")
        await pilot.click(DataTable, offset=(at, 0))
        await wait_for_text(pilot, "step▾")
        await pilot.click(DataTable, offset=(at, 0))
        await wait_for_text(pilot, "step▴")


async def test_what_is_read_of_an_id_is_taken_for_its_run(root: Path) -> None:
    runs = [make_recorded_run(root, steps=1) for _ in range(5)]
    alike = runs[4].run_id.replace("202", "201", 1)
    for run, name in zip(runs, ("before", "lr-1e-5-long-run-1", "lr-1e-5-long-run-2", alike), strict=False):
        run.path.rename(root / name)
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=SMALL) as pilot:
        told = await wait_for_text(pilot, "before", "run-1", "run-2", "state", "tok/s")
        rows = [line.split()[0] for line in told.splitlines() if "✓ completed" in line]
        assert [find_run(root, word).run_id for word in rows] == shown(app)
        await pilot.press("G", "k", "space")
        marked = shown(app)[-2]
        await wait_for(pilot, lambda: f" * {rows[-2]}" in screen_text(app).splitlines()[0])
        await pilot.press("enter")
        await wait_for(pilot, lambda: isinstance(app.screen, MonitorScreen))
        opened = await wait_for_text(pilot, "COMPLETED")
        (told_id,) = re.findall(r"ZeRO-\d  (\S+)", opened.splitlines()[0])
        assert find_run(root, told_id.strip("…")).run_id == marked


def row(**known: object) -> RunRow:
    return RunRow(**{"run_id": "a-1", "name": "demo", "status": "running", **known})  # type: ignore[arg-type]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.title)
@pytest.mark.parametrize("large_first", [True, False])
def test_what_is_not_known_comes_last_in_every_order(column: object, large_first: bool) -> None:
    title = column.title  # type: ignore[attr-defined]
    rows = [row(), row(loss=1.0, tokens_per_second=2.0, memory_bytes=3, started=4.0), row(status="lost")]
    found = ordered(rows, Order(title, large_first))
    assert sorted(map(id, found)) == sorted(map(id, rows))
    if title in ("loss", "tok/s", "memory", "age"):
        assert found[0] is rows[1]


def test_every_word_of_a_filter_must_be_there() -> None:
    known = row(model="tiny-llama", device="2xcpu", status="out_of_memory")
    assert holds(known, "") and holds(known, "TINY 2x") and holds(known, "out of memory")
    assert not holds(known, "tiny h200")


def test_a_process_whose_end_nobody_saw_is_not_said_to_have_completed() -> None:
    gone = row(status="gone")
    (state,) = (column for column in COLUMNS if column.title == "state")
    assert state.text(gone, 0.0) == "? gone" and "✓" not in state.text(gone, 0.0)
    assert holds(gone, "gone") and not holds(gone, "completed")


@pytest.mark.parametrize(("status", "told"), [("completed", "! not saved"), ("running", "● not saved")])
def test_a_run_that_is_not_saved_says_so_and_is_found_by_that(status: str, told: str) -> None:
    unsaved = row(status=status, unsaved=True)
    (state,) = (column for column in COLUMNS if column.title == "state")
    assert state.text(unsaved, 0.0) == told
    assert holds(unsaved, "not saved") and holds(unsaved, status)
    assert not holds(row(status=status), "not saved")


async def test_compares_the_marked_run_with_another(live: LiveRun, root: Path) -> None:
    other = make_recorded_run(root, steps=6)
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "● running", "✓ completed")
        await pilot.press("c")
        await wait_for_text(pilot, "Mark one run with space")
        await pilot.press("space")
        first = shown(app)[0]
        await wait_for_text(pilot, f"{first[-4:]}*", f"* {first[-4:]}")
        app.notify("a note that stays", timeout=600)
        await wait_for_text(pilot, "a note that stays")
        await pilot.press("escape")  # takes the note away, and no mark
        await wait_for(pilot, lambda: "a note that stays" not in screen_text(app))
        await pilot.pause()
        assert f"* {first[-4:]}" in screen_text(app)
        await pilot.press("c")
        await wait_for_text(pilot, f"{first[-4:]} is marked, and press c on another one")
        app.clear_notifications()
        await pilot.press("j", "c")
        await wait_for_text(pilot, "Compare", f"A is {first}", "B is ", "step time (median)")
        await pilot.press("G")
        await wait_for(pilot, lambda: f"A is {first}" not in screen_text(app))
        await pilot.press("g")
        await wait_for_text(pilot, f"A is {first}")
        await pilot.press("escape", "escape")
        await wait_for(pilot, lambda: "*" not in screen_text(app))
        assert {live.run.run_id, other.run_id} == set(shown(app))


async def test_deletes_a_run_that_has_ended_after_saying_what_goes(live: LiveRun, root: Path) -> None:
    ended = make_recorded_run(root, steps=6)
    (ended.checkpoints_dir / "step-6").mkdir()
    (ended.checkpoints_dir / "step-6" / "weights").write_bytes(b"0" * 3_000_000)
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "● running", "✓ completed")
        order = shown(app)
        await pilot.press(*["j"] * order.index(live.run.run_id), "d")
        await wait_for_text(pilot, "It goes on: stop it first")
        await pilot.press("g", *["j"] * order.index(ended.run_id), "d")
        text = await wait_for_text(
            pilot, "Delete this run?", ended.run_id, "checkpoints", "cannot be got back"
        )
        assert "2.86 MiB of them checkpoints" in text
        await without_notes(pilot)
        await pilot.press("escape")
        await wait_for(pilot, lambda: "Delete this run?" not in screen_text(app))
        assert ended.path.is_dir()
        await pilot.press("d")
        await wait_for_text(pilot, "Delete this run?")
        await pilot.press("y")
        await wait_for(pilot, lambda: shown(app) == [live.run.run_id])
    assert [path.name for path in root.iterdir()] == [live.run.run_id]


def test_a_run_that_goes_on_is_never_deleted(live: LiveRun) -> None:
    with pytest.raises(LlmtopError, match="goes on"):
        deletion.delete(live.run)
    assert live.run.path.is_dir()


def test_a_run_of_which_processes_are_left_is_not_deleted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_recorded_run(root, steps=3)
    monkeypatch.setattr(deletion, "processes_left", lambda found: [4711])
    with pytest.raises(LlmtopError, match="4711"):
        deletion.delete(run)
    assert run.path.is_dir()


def test_a_link_in_the_place_of_a_run_is_left_alone(root: Path, tmp_path: Path) -> None:
    run = make_recorded_run(root, steps=3)
    moved = tmp_path / "elsewhere"
    shutil.move(run.path, moved)
    run.path.symlink_to(moved)
    with pytest.raises(LlmtopError, match="is a link"):
        deletion.delete(run)
    assert (moved / "spec.json").exists()


def test_the_command_asks_or_is_told_not_to(llmtop: Llmtop, runs_root: Path) -> None:  # noqa: F811
    run = make_recorded_run(runs_root, steps=3)
    refused = llmtop("delete", "latest")
    assert refused.code == 2 and "--yes" in refused.err and run.path.is_dir()
    done = llmtop("delete", run.run_id, "--yes")
    assert done.code == 0 and done.out.startswith(f"deleted run {run.run_id}: ") and not run.path.exists()


async def test_hundreds_of_runs_are_listed_and_scrolled(root: Path) -> None:
    first = make_recorded_run(root, steps=2, ranks=1)
    stem = first.run_id[:-4]
    others = [end for number in range(301) if (end := f"{number:04x}") != first.run_id[-4:]]
    for end in others[:300]:
        shutil.copytree(first.path, root / f"{stem}{end}")
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for(pilot, lambda: len(shown(app)) == 301)
        await pilot.press("G")
        last = shown(app)[-1]
        await wait_for(pilot, lambda: ids_on_screen(app)[-1:] == [last[-4:]])
        await pilot.press("ctrl+u", "g")
        await wait_for(pilot, lambda: ids_on_screen(app)[:1] == [shown(app)[0][-4:]])
        shutil.rmtree(RunDir(root / last).path)
        await pilot.press("f5")
        await wait_for(pilot, lambda: len(shown(app)) == 300)

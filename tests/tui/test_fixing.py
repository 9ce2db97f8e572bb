"""After an out-of-memory the monitor offers what fits, each with a key that goes on with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from llmtop.presets.errors import ExitCode, LlmtopError
from llmtop.presets.spec import Script
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.oom.message import read_shortage
from llmtop.profiler.record.events import RankFailed
from llmtop.profiler.record.hosts import Host, Hosts, write_hosts
from llmtop.profiler.record.remote import Remote, write_remote
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.wholefile import document
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.cli import main
from tests.tui.tuiruns import LiveRun, screen_text, wait_for, wait_for_text

WIDE = (130, 40)
MESSAGE = (
    "CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of 139.80 GiB of which 3.13"
    " GiB is free. Including non-PyTorch memory, this process has 136.67 GiB memory in use. Of the allocated"
    " memory 133.94 GiB is allocated by PyTorch, and 642.55 MiB is reserved by PyTorch but unallocated."
)


@pytest.fixture
def ended(root: Path) -> LiveRun:
    """A run that ran out of memory in step 5, with a checkpoint of step 4."""
    live = LiveRun(root, kind="cuda", micro_batch=2, seq_len=4096)
    live.start()
    live.steps(1, 4)
    live.recorder.ranks[1].write(
        RankFailed(
            error_type="OutOfMemoryError",
            message=MESSAGE,
            out_of_memory=True,
            stage="backward",
            step=5,
            shortage=read_shortage(MESSAGE),
        )
    )
    live.save(4)
    live.end("out_of_memory", "rank 1 ran out of memory", "take less", rank=1)
    live.close()
    return live


@pytest.mark.parametrize("refusal", ["", "no room on the disk"])
async def test_a_key_goes_on_with_a_change_that_fits(ended: LiveRun, root: Path, refusal: str) -> None:
    asked: list[tuple[str, int]] = []

    def fix(run: RunDir, state: RunState, number: int) -> None:
        asked.append((run.run_id, number))
        if refusal:
            raise LlmtopError("it cannot go on", why=refusal)

    app = LlmtopApp("monitor", ended.run, root, deeds=Deeds(fix=fix))
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        shown = await wait_for_text(pilot, "OUT OF MEMORY", "f Fix")
        before = app.screen
        await pilot.press("f")
        shown = await wait_for_text(pilot, "Go on with a change?", "It goes on after step 4.")
        assert "rank 1 in backward of step 5" in shown
        assert "asked for 3.91 GiB: the gradient of the logits in fp32" in shown
        await pilot.press("1")
        await wait_for(pilot, lambda: asked == [(ended.run.run_id, 1)], "the fix")
        if refusal:
            await wait_for_text(pilot, refusal)
            assert app.screen is before
        else:
            await wait_for(pilot, lambda: app.screen is not before, "the monitor of the run that goes on")


async def test_the_key_says_how_many_steps_would_be_made_again(ended: LiveRun, root: Path) -> None:
    shutil.rmtree(ended.run.checkpoints_dir)
    app = LlmtopApp("monitor", ended.run, root, deeds=Deeds(fix=lambda run, state, number: pytest.fail()))
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await wait_for_text(pilot, "OUT OF MEMORY", "f Fix")
        await pilot.press("f")
        await wait_for_text(pilot, "Go on with a change?", "begins anew from step 1: the 4 steps")


def as_script(run: RunDir) -> None:
    script = Script(command=("python", "train.py"), folder="/")
    run.spec_path.write_bytes(document(msgspec.structs.replace(run.spec(), script=script)))


def as_over_hosts(run: RunDir) -> None:
    write_hosts(run, Hosts(hosts=(Host(name="h1", slots=(0, 1), first_rank=0),), launcher="pdsh"))


def as_of_another_machine(run: RunDir) -> None:
    write_remote(run.path, Remote(host="box", path="/there", alive=False))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (as_script, "it is a command of your own"),
        (as_over_hosts, "pdsh is not on the PATH"),
        (as_of_another_machine, "its folder and checkpoints are on box"),
    ],
)
async def test_what_resume_refuses_the_key_refuses(
    ended: LiveRun,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    made: Callable[[RunDir], None],
    words: str,
) -> None:
    made(ended.run)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(root))
    assert main(["resume", ended.run.run_id, "--fix", "1"]) == ExitCode.USAGE
    assert words in " ".join(capsys.readouterr().err.split())
    app = LlmtopApp(
        "monitor", RunDir(ended.run.path), root, deeds=Deeds(fix=lambda run, state, number: pytest.fail())
    )
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await wait_for_text(pilot, "OUT OF MEMORY")
        if made is as_over_hosts:
            await wait_for_text(pilot, "m Monitor")
            await pilot.press("m")
        is_here = made is not as_of_another_machine
        await wait_for(pilot, lambda: ("f Fix" in screen_text(app)) == is_here, "the keys of the footer")
        await pilot.press("f")
        assert "Go on with a change?" not in await wait_for_text(pilot, words)


@pytest.mark.parametrize("over_hosts", [False, True])
async def test_a_run_of_another_machine_is_not_offered_to_go_on_and_says_where(
    ended: LiveRun, root: Path, over_hosts: bool
) -> None:
    as_of_another_machine(ended.run)
    if over_hosts:
        as_over_hosts(ended.run)
    app = LlmtopApp("monitor", RunDir(ended.run.path), root)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        shown = await wait_for_text(pilot, "OUT OF MEMORY", "m Monitor" if over_hosts else "q Quit")
        assert "R Resume" not in shown
        await pilot.press("R")
        await wait_for_text(pilot, "its folder and checkpoints are on box", "ssh -t box llmtop resume")
        assert "Go on with this run" not in screen_text(app)


async def test_a_run_that_did_not_run_out_of_memory_has_no_such_key(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=WIDE) as pilot:
        assert "f Fix" not in await wait_for_text(pilot, "20/60", "q Quit")


async def test_a_script_is_not_changed_and_is_stopped_by_a_signal(live: LiveRun, root: Path) -> None:
    as_script(live.run)
    deeds = Deeds(change=lambda run, asked: pytest.fail(), stop=lambda run, save: None)
    app = LlmtopApp("monitor", RunDir(live.run.path), root, deeds=deeds)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        assert "c Change" not in await wait_for_text(pilot, "step 20", "s Stop")
        await pilot.press("c")
        assert "Change this run" not in await wait_for_text(
            pilot, "does not change it", "llmtop run -- python"
        )
        await pilot.press("s")
        await wait_for_text(pilot, "The run is sent SIGTERM.")
        await pilot.press("n")
        await wait_for_text(pilot, "It is sent SIGTERM.")

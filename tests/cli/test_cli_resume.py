"""`llmtop resume` on real supervisors over fake ranks."""

from __future__ import annotations

import json

from llmtop.presets.errors import ExitCode
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from tests.cli.conftest import Llmtop, Start


def save_state(run: RunDir, step: int) -> None:
    folder = run.checkpoints_dir / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "index.json").write_text("{}")
    marker = {"step": step, "position": {}, "world_size": 2, "files": {"index.json": 2}}
    (folder / "llmtop.json").write_text(json.dumps(marker))


def test_a_stopped_run_goes_on_in_its_folder(start: Start, llmtop: Llmtop) -> None:
    first = start("trains")
    first.wait_for_step(1)
    assert llmtop("stop", "latest").code == ExitCode.DONE
    assert read_state(first.run).status == "stopped"
    save_state(first.run, 1)
    answer = llmtop("resume", "--detach", "latest")
    assert (answer.code, answer.out.strip()) == (ExitCode.DONE, first.run.run_id), answer.err
    assert "goes on after step 1, from " in answer.err
    # From the first moment it is a run that goes on, whatever its record says of an earlier end.
    assert read_state(first.run).status in ("starting", "running")
    assert llmtop("stop", "latest").code == ExitCode.DONE
    assert read_state(first.run).status == "stopped"


def test_what_cannot_be_gone_on_with_is_refused(start: Start, llmtop: Llmtop) -> None:
    run = start("trains")
    run.wait_for_step(1)
    going_on = llmtop("resume", "latest")
    assert (going_on.code, "is going on" in going_on.err) == (ExitCode.USAGE, True)
    assert llmtop("stop", "latest").code == ExitCode.DONE
    bare = llmtop("resume", "latest")
    assert (bare.code, "has no checkpoint to go on from" in bare.err) == (ExitCode.USAGE, True)
    save_state(run.run, 1)
    (run.run.checkpoints_dir / "step-1" / "index.json").write_text("torn away")
    torn = llmtop("resume", "latest")
    assert (torn.code, "has no checkpoint to go on from" in torn.err) == (ExitCode.USAGE, True)

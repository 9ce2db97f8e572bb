"""`llmtop set` on real supervisors over fake ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from llmtop.presets.errors import ExitCode
from llmtop.presets.spec import Script
from llmtop.profiler.record.changeevents import ChangeRefused
from llmtop.profiler.record.rundir import InForce, RunDir
from llmtop.trainer import control
from llmtop.trainer.change.restagefolder import restage_folders
from tests.cli.conftest import Llmtop
from tests.hosts.lab import wait_for
from tests.recorded_spec import recorded_prediction, recorded_spec
from tests.trainer.supervised import SHORT_GRACES, Supervised, fake_ranks


@pytest.fixture
def run(runs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    """A run that does what is asked of it, after its first step."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fake_ranks(monkeypatch, "changes", SHORT_GRACES)
    supervised = Supervised(runs_root, micro_batch=4, grad_accum=2)
    supervised.start()
    supervised.wait_for_step(1)
    yield supervised
    supervised.clean_up()


def test_a_change_is_previewed_made_and_told(run: Supervised, llmtop: Llmtop) -> None:
    answer = llmtop("set", "latest", "micro_batch=2")
    assert answer.code == ExitCode.DONE
    assert "the change is made between two steps, without a pause:" in answer.out
    assert "micro_batch  4 -> 2" in answer.out
    assert "grad_accum   2 -> 4  (keeps the global batch)" in answer.out
    assert "peak a rank" in answer.out and "needs in all" in answer.out and "step time" in answer.out
    assert answer.out.splitlines()[-1].startswith("changed from step ")


def test_a_relaunch_says_how_long_it_was_down(run: Supervised, llmtop: Llmtop) -> None:
    answer = llmtop("set", "latest", "zero=3", "learning_rate=1e-4", "--json")
    found = answer.json()
    assert (answer.code, found["status"], found["restage"]) == (ExitCode.DONE, "applied", True)
    assert [c["key"] for c in found["changes"] if c.get("restage")] == ["zero"]
    assert found["down_seconds"] > 0 and found["step"] > 1 and found["setting"] == 1
    assert found["then"]["peak_allocated_bytes"] > 0 and found["now"]["fits"] is True


def test_a_dry_run_changes_nothing(run: Supervised, llmtop: Llmtop) -> None:
    answer = llmtop("set", "latest", "zero=3", "seq_len=128", "--dry-run")
    assert answer.code == ExitCode.DONE
    assert "zero     2 -> 3" in answer.out and "(by a relaunch)" in answer.out
    assert "(would be made without one)" in answer.out
    assert "lost: " in answer.out and "down for: not known" in answer.out
    assert answer.out.splitlines()[-1] == "nothing was changed: --dry-run"
    assert "mind: " not in answer.out
    longer = llmtop("set", "latest", "seq_len=500000", "micro_batch=1", "--force", "--dry-run")
    assert "mind: " in longer.out and "positions that it has not seen" in longer.out
    assert "; seq_len=" in longer.out and "--seq-len" not in longer.out
    assert llmtop("set", "latest", "zero=3", "--dry-run", "--json").json()["status"] == "preview"
    assert control.read_requests(run.run) == [] and run.run.in_force() == InForce()
    assert llmtop("set", "latest", "zerro=3", "--dry-run").code == ExitCode.USAGE
    assert control.read_requests(run.run) == []


def test_refusals_have_their_exit_codes_and_are_in_the_record(run: Supervised, llmtop: Llmtop) -> None:
    unknown = llmtop("set", "latest", "micro_btch=2")
    assert unknown.code == ExitCode.USAGE
    assert "micro_btch=2: unknown key 'micro_btch'" in unknown.err
    assert "did you mean 'micro_batch'?" in unknown.err
    big = llmtop("set", "latest", "micro_batch=20000", "--keep-global-batch", "no")
    assert big.code == ExitCode.DOES_NOT_FIT
    assert "predicted not to fit" in big.err and "--force" in big.err
    run.wait_for(lambda: bool(run.of(ChangeRefused)))
    # A slip of the pen was never a change.
    for slip in ("lr=0.001", "foo=3", "micro_batch", "micro_batch=many"):
        assert llmtop("set", "latest", slip).code == ExitCode.USAGE
    assert [refused.asked for refused in run.of(ChangeRefused)] == [("micro_batch=20000",)]
    assert len(control.read_requests(run.run)) == 1 and run.run.in_force() == InForce()


def test_a_setting_that_fails_is_a_failure_of_the_command(run: Supervised, llmtop: Llmtop) -> None:
    (run.run.path / "fails-on").write_text("1")
    answer = llmtop("set", "latest", "attention=eager")
    assert answer.code == ExitCode.JOB_FAILED
    assert "this setting cannot be built" in answer.err and "back on its old setting" in answer.err


def test_asking_alone_does_not_wait_and_an_ended_run_takes_nothing(run: Supervised, llmtop: Llmtop) -> None:
    (run.run.path / "hangs-on").write_text("1")
    answer = llmtop("set", "latest", "zero=3", "--wait", "0")
    assert answer.code == ExitCode.DONE and "the change is under way" in answer.out
    run.wait_for_files("hangs")
    control.stop(run.run, save=False)
    run.end()
    ended = llmtop("set", "latest", "micro_batch=2")
    assert ended.code == ExitCode.USAGE and "it has ended" in ended.err
    assert f"llmtop resume {run.run.run_id} micro_batch=2 goes on with it" in ended.err


def test_stop_of_a_run_lost_in_a_relaunch_frees_the_memory_and_keeps_the_state(
    run: Supervised, llmtop: Llmtop
) -> None:
    (run.run.path / "hangs-on").write_text("1")
    control.change(run.run, control.SetParams(words=("zero=3",)))
    run.wait_for_files("hangs")
    os.kill(run.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not run.run.supervisor_alive())
    answer = llmtop("stop", "latest")
    assert answer.code == ExitCode.DONE and "lost" in answer.out
    assert restage_folders(run.run) == ()
    (kept,) = run.run.checkpoints_dir.iterdir()
    assert f"a state saved for a relaunch is kept as {kept}" in answer.out


@pytest.mark.parametrize("words", [("learning_rate=0.1",), ("micro_batch=4",), ("steps=9", "--dry-run")])
def test_a_command_of_ones_own_is_refused_before_anything_is_said_of_it(
    runs_root: Path, llmtop: Llmtop, words: tuple[str, ...]
) -> None:
    spec = replace(recorded_spec(), script=Script(command=("python", "my train.py"), folder="/"))
    run = RunDir.create(runs_root, spec, recorded_prediction(spec), {})
    answer = llmtop("set", "latest", *words)
    assert (answer.code, answer.out) == (ExitCode.USAGE, "")
    assert "llmtop watches it and does not change it" in " ".join(answer.err.split())
    assert "llmtop run -- python 'my train.py'" in " ".join(answer.err.split())
    assert control.read_requests(run) == []

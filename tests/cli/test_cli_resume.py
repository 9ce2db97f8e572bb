"""`llmtop resume` on real supervisors over fake ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.presets.spec import Script
from llmtop.profiler.changewords import outcome
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import InForce, RunDir
from llmtop.trainer.change.afterend import fixes_of, plan_after_end
from llmtop.trainer.launch import resume_run
from llmtop.tui.asking import deeds
from llmtop.tui.asking.resuming import ResumeWish
from tests.cli.conftest import Llmtop, Start
from tests.recorded_spec import recorded_prediction, recorded_spec


def save_state(run: RunDir, step: int) -> None:
    folder = run.checkpoints_dir / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "index.json").write_text("{}")
    marker = {"step": step, "position": {}, "world_size": 2, "files": {"index.json": 2}}
    (folder / "llmtop.json").write_text(json.dumps(marker))


def test_a_stopped_run_goes_on_in_its_folder(start: Start, llmtop: Llmtop) -> None:
    far = 500_000
    first = start("trains", steps=2 * far)
    first.wait_for_step(1)
    assert llmtop("stop", "latest").code == ExitCode.DONE
    assert read_state(first.run).status == "stopped"
    save_state(first.run, far)
    answer = llmtop("resume", "--detach", "latest")
    assert (answer.code, answer.out.strip()) == (ExitCode.DONE, first.run.run_id), answer.err
    assert "goes on after step 500,000, from " in answer.err
    assert "note: nothing is saved: checkpoint_every is 0" in answer.err
    # From the first moment it is a run that goes on, whatever its record says of an earlier end.
    assert read_state(first.run).status in ("starting", "running")
    with pytest.raises(UsageError, match="is going on"):
        deeds.going_on(first.run)
    first.wait_for_step(far + 1)
    assert llmtop("stop", "latest").code == ExitCode.DONE
    assert read_state(first.run).status == "stopped"
    # The same from inside the app, and from a step that is long past.
    shutil.rmtree(first.run.checkpoints_dir)
    save_state(first.run, 1)
    told = [len(first.events(rank)) for rank in (0, 1)]
    deeds.resume(first.run, deeds.going_on(first.run), ResumeWish())
    assert first.run.supervisor_alive()
    # A rank that has made no step would be killed by what asks it to save.
    first.wait_for(lambda: all(len(first.events(rank)) > count for rank, count in enumerate(told)))
    first.wait_for(lambda: not read_state(first.run).is_beginning)
    # The steps that were made before it went on are none that its checkpoint lacks.
    saved = llmtop("stop", "--save", "latest")
    assert (saved.code, saved.out.splitlines()[-1]) == (ExitCode.DONE, "checkpoint: checkpoints/x"), saved.err
    state = read_state(first.run)
    assert state.status == "stopped" and 1 < state.checkpoints[-1].step == state.steps_finished < far


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


def test_steps_that_were_not_saved_are_made_again_only_when_told_to(start: Start, llmtop: Llmtop) -> None:
    run = start("trains")
    run.wait_for_step(1)
    assert llmtop("stop", "latest").code == ExitCode.DONE
    made = read_state(run.run).steps_finished
    for words in ((), ("steps=900",)):
        refused = llmtop("resume", "latest", *words)
        assert (refused.code, run.run.in_force()) == (ExitCode.USAGE, InForce()), refused.err
        told = " ".join(refused.err.split())
        assert "has no checkpoint to go on from" in told and f"the {made} step" in told
        again = " ".join(("llmtop resume", run.run.run_id, *words, "--anew"))
        assert f"{again} begins anew from step 1; or start another one: llmtop run" in told
        with pytest.raises(UsageError, match="has no checkpoint to go on from"):
            deeds.resume(run.run, deeds.going_on(run.run), ResumeWish(words=words))
    answer = llmtop("resume", "--detach", "latest", "steps=900", "--anew")
    assert answer.code == ExitCode.DONE, answer.err
    assert f"begins anew from step 1: the {made} step" in answer.err and "not saved" in answer.err
    assert llmtop("stop", "latest").code == ExitCode.DONE
    save_state(run.run, 1)
    refused = llmtop("resume", "latest", "--anew")
    assert (refused.code, "has a checkpoint of step 1" in refused.err) == (ExitCode.USAGE, True)


@pytest.mark.parametrize("saved", [2, None])
def test_a_run_that_ran_out_of_memory_goes_on_with_a_fix(
    start: Start, llmtop: Llmtop, saved: int | None
) -> None:
    first = start("fits_when_smaller", micro_batch=4)
    end = first.end()
    assert end.state == "out_of_memory" and f"llmtop resume {first.run.run_id} --fix 1" in end.fix
    assert ("begins the run anew" if saved is None else "--fix") in end.fix
    if saved is not None:
        save_state(first.run, saved)
    known = fixes_of(first.run, read_state(first.run))
    number = next(fix.number for fix in known if "micro_batch" in fix.change)
    told = " ".join(llmtop("report", "latest").out.split())
    assert f"fix {number} micro-batch 2" in told and f"resume {first.run.run_id} --fix {number}" in told
    for words, why in ((("--fix", "9"), "has no fix 9"), (("--fix", "1", "zero=3"), "exclude each other")):
        refused = llmtop("resume", "latest", *words)
        assert (refused.code, why in refused.err) == (ExitCode.USAGE, True), refused.err
    anew = () if saved else ("--anew",)
    if anew:
        assert f"--fix {number} --anew" in told and "--fix 1 --anew" in end.fix
        refused = llmtop("resume", "latest", "--fix", str(number))
        assert refused.code == ExitCode.USAGE and "the 1 step that it has made was not saved" in refused.err
        assert f"llmtop resume {first.run.run_id} --fix {number} --anew begins anew" in refused.err
    answer = llmtop("resume", "--detach", "latest", "--fix", str(number), *anew)
    assert answer.code == ExitCode.DONE, answer.err
    assert "micro_batch  4 -> 2" in answer.err
    assert (f"goes on after step {saved}" if saved else "begins anew") in answer.err
    assert first.end().state == "completed"
    state = read_state(first.run)
    assert (state.changes.setting, first.run.in_force()) == (1, InForce(setting=1))
    (record,) = state.changes.records
    assert (record.status, record.step) == ("applied", 1 + (saved or 0))
    assert {rank.setting for rank in state.ranks.values()} == {1}
    # Its report is of the setting that it ended on.
    assert "completed" in llmtop("report", "latest").out
    nothing = llmtop("resume", "latest", "--fix", "1")
    assert nothing.code == ExitCode.USAGE


def test_an_ended_run_goes_on_with_a_change_of_ones_own(start: Start, llmtop: Llmtop) -> None:
    run = start("fits_when_smaller", micro_batch=4)
    run.end()
    refused = llmtop("resume", "latest", "micro_batch=3", "--anew")
    assert (refused.code, "does not divide" in refused.err) == (ExitCode.USAGE, True)
    other_model = llmtop("resume", "latest", "model=gpt2", "--anew").err
    assert "model of a run that is resumed cannot be changed" in other_model
    assert run.run.in_force() == InForce()
    too_large = llmtop("resume", "latest", "micro_batch=40000", "grad_accum=1", "--anew")
    assert too_large.code == ExitCode.DOES_NOT_FIT and run.run.in_force() == InForce()
    # One that fails again on the new setting says so, and ends on it.
    assert llmtop("resume", "--detach", "latest", "zero=3", "--anew").code == ExitCode.DONE
    assert run.end().state == "out_of_memory"
    (record,) = read_state(run.run).changes.records
    assert "failed before its first step" in outcome(record) or record.status == "applied"
    assert run.run.in_force() == InForce(setting=1)


def test_a_run_that_has_made_all_its_steps_makes_more(start: Start, llmtop: Llmtop) -> None:
    run = start("finishes", steps=3)
    assert run.end().state == "completed"
    name = run.run.run_id
    # It must not be made from its first step again where its last one was not saved: that is said at once.
    vain: tuple[tuple[str, ...], ...] = ((), ("steps=5",), ("--anew",))
    for words in vain:
        unsaved = llmtop("resume", "latest", *words)
        assert (unsaved.code, "has no checkpoint to go on from" in unsaved.err) == (ExitCode.USAGE, True)
        assert "fix: start another one: llmtop run" in unsaved.err and "steps=" not in unsaved.err
    with pytest.raises(UsageError, match="has no checkpoint to go on from"):
        deeds.going_on(run.run)
    save_state(run.run, 3)
    changes: tuple[tuple[str, ...], ...] = ((), ("micro_batch=1", "grad_accum=1"))
    for words in changes:
        made = llmtop("resume", "latest", *words)
        assert made.code == ExitCode.USAGE and "has made all its 3 steps" in made.err
        assert f"llmtop resume {name} steps=N" in made.err
    assert deeds.going_on(run.run).status == "completed"
    fewer = llmtop("resume", "latest", "steps=2")
    assert (fewer.code, "has made 3 steps, and would be one of 2" in fewer.err) == (ExitCode.USAGE, True)
    assert run.run.in_force() == InForce()
    answer = llmtop("resume", "--detach", "latest", "steps=5")
    assert answer.code == ExitCode.DONE, answer.err
    assert "steps  3 -> 5" in answer.err and "goes on after step 3, from " in answer.err
    assert "lost: the learning rate jumps to the cosine schedule of 5 steps" in answer.err
    assert run.end().state == "completed"
    assert (run.run.in_force(), run.run.spec().options.steps) == (InForce(setting=1), 5)


@pytest.mark.parametrize(
    ("pid", "again"), [(None, "llmtop run -- python 'my train.py'"), (7, "again: python 'my train.py'")]
)
def test_a_command_of_ones_own_is_not_gone_on_with(
    runs_root: Path, llmtop: Llmtop, pid: int | None, again: str
) -> None:
    script = Script(command=("python", "my train.py"), folder="/", pid=pid)
    spec = replace(recorded_spec(), script=script)
    run = RunDir.create(runs_root, spec, recorded_prediction(spec), {})
    save_state(run, 3)
    for words in ((), ("steps=90",), ("micro_batch=2",)):
        refused = llmtop("resume", "latest", *words)
        assert refused.code == ExitCode.USAGE, refused.err
        assert "which keeps its checkpoints itself" in refused.err and again in refused.err
    for go_on in (resume_run, lambda found: plan_after_end(found, ["steps=90"])):
        with pytest.raises(UsageError, match="cannot be gone on with"):
            go_on(run)

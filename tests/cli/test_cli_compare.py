"""`llmtop compare` as it is typed."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from llmtop.presets.errors import ExitCode
from llmtop.presets.spec import Provenance, ValueSource
from llmtop.profiler.effects.compare import change, compare
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.wholefile import document
from llmtop.trainer.change.plan import BY_SET
from llmtop.tui.commands.compare import render
from tests.cli.conftest import Llmtop
from tests.recorded import BEGAN, Recorder, make_recorded_run
from tests.recorded_spec import recorded_prediction, recorded_spec


def test_two_runs_by_part_of_their_ids(llmtop: Llmtop, runs_root: Path) -> None:
    one = make_recorded_run(runs_root, steps=12)
    two = make_recorded_run(runs_root, steps=12, zero=1)
    answer = llmtop("compare", one.run_id, "latest")
    assert answer.code == ExitCode.DONE and answer.err == ""
    for words in (
        f"A is {one.run_id}",
        f"B is {two.run_id}",
        "zero: 2 (default) -> 1 (default)",
        "step time (median)",
        "B - A",
    ):
        assert words in answer.out
    assert all(len(line) <= 100 for line in answer.out.splitlines())
    found = llmtop("compare", one.run_id[-4:], two.run_id[-4:], "--json").json()
    assert (found["first"]["run_id"], found["second"]["run_id"]) == (one.run_id, two.run_id)
    assert [option["option"] for option in found["options"]] == ["zero"]


def test_a_value_that_was_set_later_is_not_from_the_launch(
    llmtop: Llmtop, runs_root: Path, tmp_path: Path
) -> None:
    one, two = make_recorded_run(runs_root, steps=4), make_recorded_run(runs_root, steps=4, zero=1)
    spec = two.spec()
    two.spec_path.write_bytes(
        document(
            replace(
                spec,
                provenance={
                    **spec.provenance,
                    "zero": Provenance(source=ValueSource.COMMAND_LINE, detail=BY_SET),
                },
            )
        )
    )
    assert "zero: 2 (default) -> 1 (llmtop set)" in llmtop("compare", one.run_id, two.run_id).out
    page = tmp_path / "page.html"
    assert llmtop("compare", one.run_id, two.run_id, "--html", str(page)).code == ExitCode.DONE
    assert "llmtop set" in page.read_text() and "command line" not in page.read_text()


def test_a_run_that_is_not_there_and_one_run_alone_are_wrong_usage(llmtop: Llmtop, runs_root: Path) -> None:
    run = make_recorded_run(runs_root, steps=4)
    answer = llmtop("compare", run.run_id, "nothing-like-it")
    assert answer.code == ExitCode.USAGE and "there is no run" in answer.err
    assert llmtop("compare", run.run_id).code == ExitCode.USAGE


def test_help_shows_an_example(llmtop: Llmtop) -> None:
    answer = llmtop("compare", "--help")
    assert answer.code == ExitCode.DONE and "llmtop compare 20261129-1845 latest" in answer.out


def test_a_change_that_is_smaller_than_steps_differ_is_noise(llmtop: Llmtop, runs_root: Path) -> None:
    one = make_recorded_run(runs_root, steps=30)
    alike = make_recorded_run(runs_root, steps=30, pace=1.005)
    slower = make_recorded_run(runs_root, steps=30, pace=1.5)
    noise = " ".join(llmtop("compare", one.run_id, alike.run_id).out.split())
    assert "Half of the steps of A took" in noise and "within noise" in noise
    clear = llmtop("compare", one.run_id, slower.run_id)
    assert "Half of the steps of A took" in clear.out and "within noise" not in clear.out
    found = llmtop("compare", one.run_id, alike.run_id, "--json").json()
    spread = found["first"]["step_spread"]
    assert found["speed_within_noise"] is True
    assert spread["low_seconds"] < found["changes"][0]["first"] < spread["high_seconds"]
    few = make_recorded_run(runs_root, steps=3)
    assert "of B took" not in llmtop("compare", one.run_id, few.run_id).out


def test_each_figure_is_judged_by_its_own_spread(llmtop: Llmtop, runs_root: Path) -> None:
    """Steps that are slow now and then take throughput down, which is a mean, and leave the median."""
    one = make_recorded_run(runs_root, steps=60)
    spec = recorded_spec(steps=60)
    halting = RunDir.create(runs_root, spec, recorded_prediction(spec), {})
    recorder = Recorder(halting, spec, BEGAN)
    recorder.start()
    usual = recorder.steady_seconds
    for step in range(1, 61):
        recorder.steady_seconds = usual * (4 if step % 6 == 0 else 1)
        recorder.step(step)
    recorder.end("completed", 60)
    recorder.close()
    told = " ".join(llmtop("compare", one.run_id, halting.run_id).out.split())
    assert "; step time differs by less than from step to step: within noise" in told and "MFU" not in told
    found = llmtop("compare", one.run_id, halting.run_id, "--json").json()
    changes = {one["name"]: one for one in found["changes"]}
    assert changes["tokens_per_second"]["percent"] < -20
    noisy = [name for name, one in changes.items() if one["within_noise"]]
    assert (noisy, found["speed_within_noise"]) == (["step_seconds"], False)
    alike = make_recorded_run(runs_root, steps=60, pace=1.005)
    both = " ".join(llmtop("compare", one.run_id, alike.run_id).out.split())
    assert "; step time and throughput differ by less than from step to step: within noise" in both
    gpus = [make_recorded_run(runs_root, kind="cuda", steps=30, pace=pace) for pace in (1.0, 1.005)]
    on_gpus = " ".join(llmtop("compare", *(run.run_id for run in gpus)).out.split())
    assert "; step time, throughput and MFU differ by less than from step to step: within noise" in on_gpus


def test_next_to_nothing_has_no_percentage(runs_root: Path) -> None:
    one, two = make_recorded_run(runs_root, steps=6), make_recorded_run(runs_root, steps=6)
    found = compare(one, two)
    small = change("fragmentation", "bytes", 400_000, 0)
    large = change("logits", "bytes", 40_000_000, 0)
    text = "\n".join(render(replace(found, changes=(*found.changes, small, large)), 100))
    rows = [line for line in text.splitlines() if "0 B" in line and "MiB" in line or "KiB" in line]
    assert any("fragmentation" in line and "%" not in line for line in rows)
    assert any("logits" in line and "-100.0%" in line for line in rows)

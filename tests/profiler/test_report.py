"""The report: machine-readable with nothing guessed, and a text whose printed numbers add up."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.cost.flops import utilisation
from llmtop.profiler.export.secrets import Scrubber
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import RankExited, RankStarted, StageBegan, StepFinished
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.columns import GIB, MIB, ColumnUnit, print_addends
from llmtop.profiler.report.contents import Report
from llmtop.profiler.report.page import run_page
from llmtop.profiler.report.pagedata import read_page
from llmtop.profiler.report.text import render
from tests.recorded import BEGAN, Recorder, make_recorded_run
from tests.recorded_spec import Kind, recorded_prediction, recorded_spec


def as_json(report: Report) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(report))
    return plain


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_json_has_predicted_and_actual_for_every_component_and_adds_up(tmp_path: Path, kind: Kind) -> None:
    report = as_json(build_report(make_recorded_run(tmp_path, kind=kind)))
    for row in report["components"]:
        assert set(row) == {"component", "predicted_bytes", "actual_bytes", "error_percent", "in_peak"}
        assert isinstance(row["predicted_bytes"], int) and isinstance(row["actual_bytes"], int)
    inside = [row for row in report["components"] if row["in_peak"]]
    assert (
        sum(row["actual_bytes"] for row in inside) + report["unexplained_bytes"]
        == report["actual_peak_bytes"]
    )
    assert sum(row["predicted_bytes"] for row in inside) == report["predicted_peak_bytes"]
    share = 100 * report["unexplained_bytes"] / report["actual_peak_bytes"]
    assert report["unexplained_percent"] == pytest.approx(share)
    assert abs(report["unexplained_percent"]) < 15
    if kind == "cpu":
        assert len(inside) == len(report["components"])


def test_facts_of_a_completed_run(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, checkpoint_every=30)
    report = build_report(run)
    assert (report.run_id, report.status, report.name) == (run.run_id, "completed", "cpu-demo")
    assert (report.steps_finished, report.steps_planned, report.skipped_steps) == (60, 60, 0)
    assert report.step_seconds == pytest.approx(0.4, rel=0.05)
    assert report.tokens_per_step is not None
    assert report.tokens_per_second == pytest.approx(report.tokens_per_step / 0.4, rel=0.05)
    assert report.first_loss is not None and report.last_loss is not None
    assert report.last_loss < 0.7 * report.first_loss
    assert {phase.phase for phase in report.phases} == {"data", "forward", "backward", "optimizer"}
    assert sum(phase.percent for phase in report.phases) == pytest.approx(100)
    assert [stage.stage for stage in report.startup][:2] == ["import", "process_group"]
    assert [(rank.rank, rank.exit_code, rank.last_step) for rank in report.ranks] == [(0, 0, 60), (1, 0, 60)]
    assert report.versions["torch"] == "2.13.0" and report.versions["llmtop"] == "0.1.0"
    assert all(Path(path).exists() for path in report.files.values())
    assert len(report.checkpoints) == 2 and report.not_saved == ""


def test_utilisation_stands_beside_the_rate(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, kind="cuda")
    report = build_report(run)
    spec, share = run.spec(), utilisation(run.spec(), report.tokens_per_second)
    assert share is not None and report.mfu_percent == pytest.approx(100 * share.mfu)
    assert report.needed_mfu_percent == pytest.approx(100 * share.needed)
    assert report.peak_flops_per_second == spec.world_size * 989.4e12
    assert f"{share.mfu:.1%} of 1,979 TFLOP/s (bf16, dense)" in render(report)
    on_cpu = build_report(make_recorded_run(tmp_path, kind="cpu"))
    assert on_cpu.mfu_percent is None and on_cpu.peak_flops_per_second is None
    assert "MFU             n/a" in render(on_cpu)


def test_skipped_steps_and_loss_scale_of_fp16_are_shown(tmp_path: Path) -> None:
    spec = recorded_spec("cuda", ranks=1, steps=3, precision="fp16")
    run = RunDir.create(tmp_path, spec, recorded_prediction(spec), {})
    recorder = Recorder(run, spec, BEGAN)
    recorder.start()
    for step, scale in enumerate((65536.0, 32768.0, 32768.0), start=1):
        recorder.ranks[0].write(
            StepFinished(step=step, loss=2.0, loss_scale=scale, skipped=step == 2, step_seconds=0.5)
        )
    recorder.end("completed", 3)
    recorder.close()
    report = build_report(run)
    assert (report.skipped_steps, report.first_loss_scale, report.last_loss_scale) == (1, 65536, 32768)
    shown = render(report)
    assert "3 of 3, 1 skipped of 3 made" in shown and "65,536 -> 32,768" in shown
    assert "steps, 1 skipped of 3 made" in run_page(read_page(run, Scrubber()))
    plain = render(build_report(make_recorded_run(tmp_path, kind="cuda", steps=3)))
    assert " skipped" not in plain and "loss scale" not in plain


def test_a_run_lasts_by_the_clock_that_began_and_ended_it(tmp_path: Path) -> None:
    """Not by that of a rank on a host that is hours ahead."""
    run = make_recorded_run(tmp_path, steps=3)
    expected = build_report(run).seconds
    first, *steps = run.events_path(1).read_text().splitlines()
    ahead = [json.loads(line) for line in steps]
    lines = [json.dumps({**line, "t": line["t"] + 3 * 3600.0}) for line in ahead]
    run.events_path(1).write_text("\n".join([first, *lines, ""]))
    assert expected is not None and build_report(run).seconds == pytest.approx(expected, abs=1.0)


def test_weights_data_and_tokenizer_are_named(tmp_path: Path) -> None:
    report = build_report(make_recorded_run(tmp_path))
    assert report.inputs.weights.startswith("random")
    lines = render(report).splitlines()
    for name in ("weights", "data", "tokenizer"):
        assert any(line.startswith(f"  {name} ") for line in lines)


def test_warm_up_is_not_in_the_step_time(tmp_path: Path) -> None:
    report = build_report(make_recorded_run(tmp_path, steps=3))
    assert report.step_seconds is not None and report.step_seconds < 0.42
    assert build_report(make_recorded_run(tmp_path, steps=2)).step_seconds is None
    assert "n/a, too few steps after the first 2" in render(
        build_report(make_recorded_run(tmp_path, steps=2))
    )


def empty_run(root: Path) -> RunDir:
    spec = recorded_spec()
    run = RunDir.create(root, spec, recorded_prediction(spec), {})
    run.write_supervisor_pid()
    return run


def test_before_the_first_step_nothing_is_guessed(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    report = build_report(run)
    assert report.status == "starting"
    assert report.actual_peak_bytes is None and report.unexplained_bytes is None
    assert report.step_seconds is None and report.last_loss is None and report.seconds is None
    text = render(report)
    assert "0 of 60" in text and "n/a" in text and "none started" in text
    with EventWriter(run.events_path(0), "rank0") as writer:
        writer.write(StageBegan(stage="import"))
    assert "import not finished" in render(build_report(run))


def test_a_broken_prediction_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path)
    run.prediction_path.write_text("{}")
    with pytest.raises(LlmtopError, match=r"prediction\.json"):
        build_report(RunDir.open(run.path))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("end", ["completed", "failed", "out_of_memory", None])
@pytest.mark.parametrize("width", [80, 100])
def test_text_keeps_to_its_width_and_says_how_it_ended(
    tmp_path: Path, kind: Kind, end: Any, width: int
) -> None:
    report = build_report(make_recorded_run(tmp_path, kind=kind, end=end))
    lines = render(report, width).splitlines()
    assert all(len(line) <= width for line in lines if "folder" not in line)
    assert lines[0].startswith(report.run_id)
    assert lines[0].endswith((end or "running").replace("_", " "))
    assert report.reason in render(report, 1000)


NUMBER = r"(-?[\d,]+\.\d+)"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_printed_columns_add_up_as_printed(tmp_path: Path, kind: Kind) -> None:
    text = render(build_report(make_recorded_run(tmp_path, kind=kind)))
    table = text.partition("Peak memory")[2].partition("sum = peak")
    rows = [re.findall(rf" {NUMBER}(?=\s|$)", line) for line in table[0].splitlines()]
    predicted = [Decimal(row[0]) for row in rows if len(row) >= 2]
    actual = [Decimal(row[-1]) for row in rows if row]
    shown = re.findall(NUMBER, table[2].splitlines()[0])
    assert sum(predicted) == Decimal(shown[0])
    assert sum(actual) == Decimal(shown[1])


def test_a_killed_rank_and_the_others_are_named(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, ranks=4, end="failed")
    text = render(build_report(run), 200)
    assert "rank 0 ended by SIGKILL after step 60; ranks 1 to 3 ended by SIGTERM after step 60" in text
    assert "the run failed" in text and "kernel log" in text


def test_many_ranks_are_told_in_one_line(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    with EventWriter(run.events_path("supervisor"), "supervisor") as writer:
        for rank in range(0, 40, 2):
            writer.write(RankStarted(rank=rank, pid=100 + rank))
            writer.write(RankExited(rank=rank, pid=100 + rank, exit_code=0))
    assert "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more exited with 0" in render(build_report(run), 200)


def test_lines_that_were_left_out_are_counted(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path)
    with run.events_path(1).open("a") as file:
        file.write('{"kind": "from_the_future", "v": 9}\n')
    report = build_report(run)
    assert report.skipped_lines == 1
    assert "1 line is damaged or of a newer version" in render(report, 200)


@given(
    st.lists(st.one_of(st.none(), st.integers(min_value=-(2**40), max_value=2**42)), min_size=1, max_size=12),
    st.sampled_from([MIB, GIB]),
)
def test_addends_always_add_up(values: list[int | None], unit: ColumnUnit) -> None:
    texts, total = print_addends(values, unit)
    known = [(v, Decimal(t.replace(",", ""))) for v, t in zip(values, texts, strict=True) if v is not None]
    assert [t for v, t in zip(values, texts, strict=True) if v is None] == ["n/a"] * (
        len(values) - len(known)
    )
    if not known:
        assert total == "n/a"
        return
    assert sum(shown for _, shown in known) == Decimal(total.replace(",", ""))
    for value, shown in known:
        assert abs(float(shown) - value / unit.size_bytes) <= 1.0001 / 10**unit.decimals


def test_what_error_means_is_said_and_small_components_have_none(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path)
    report = build_report(run)
    text = " ".join(render(report).split())
    assert "+ where more was predicted" in text
    assert "in use, " in text and "held by the process" in text
    peak = report.actual_peak_bytes or 0
    small = tuple(
        replace(c, predicted_bytes=0, actual_bytes=round(0.004 * peak), error_percent=-100.0)
        for c in report.components
    )
    alarming = render(replace(report, components=small, peak_error_percent=None))
    assert "-100.0%" not in alarming

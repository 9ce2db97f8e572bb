"""Two recorded runs side by side: options that differ, changes that add up, and what makes it unfair."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmtop.profiler.effects.compare import Comparison, compare
from llmtop.profiler.effects.kernelnames import AttentionKernel
from llmtop.profiler.effects.switches import measure
from llmtop.profiler.export.secrets import Scrubber
from llmtop.profiler.record.changeevents import ChangeAsked, RestageBegan
from llmtop.profiler.record.deviceevents import DeviceSample
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import (
    AnyEvent,
    BaselineMeasured,
    HardwareSampled,
    KernelsSeen,
    PhaseMemory,
    RunEnd,
    RunEnded,
    StepFinished,
)
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.comparepage import read_compare_page
from llmtop.profiler.report.text import render as render_report
from llmtop.tui.commands.compare import render
from tests.profiler.test_report_page import require_harmless
from tests.recorded import BEGAN, Recorder, make_recorded_run
from tests.recorded_changes import make_changed_run
from tests.recorded_spec import GIB, recorded_prediction, recorded_spec


def flash(attention: str = AttentionKernel.FLASH_2) -> KernelsSeen:
    return KernelsSeen(step=3, src="rank0", attention=attention, optimizer="deepspeed_fused_adam")


def rows(found: Comparison) -> dict[str, Any]:
    return {change.name: change for change in found.changes}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_components_add_up_to_the_peak_in_each_column(tmp_path: Path, kind: Any) -> None:
    one = make_recorded_run(tmp_path, kind=kind)
    two = make_recorded_run(tmp_path, kind=kind, micro_batch=8, pace=1.5)
    found = compare(one, two)
    names = [c.name for c in found.changes]
    inside = found.changes[names.index("peak_bytes") + 1 : names.index("unexplained") + 1]
    for column in ("first", "second", "change"):
        values = [getattr(change, column) for change in inside]
        assert None not in values
        assert sum(values) == getattr(rows(found)["peak_bytes"], column)
    share = rows(found)["mfu_percent"]
    assert (share.first is None) is (kind == "cpu")
    shown = any(line.startswith("MFU (PaLM's count)") for line in render(found, 100))
    assert shown is (kind == "cuda")
    step = rows(found)["step_seconds"]
    assert step.percent == pytest.approx(50, abs=1)
    assert step.change == pytest.approx(step.second - step.first)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_is_held_beside_the_peak_is_what_the_report_says(tmp_path: Path, kind: Any) -> None:
    run = make_recorded_run(tmp_path, kind=kind, ranks=1)
    if kind == "cpu":
        # The peak of what was in use, below what the process kept of it in its other steps.
        writer = EventWriter(run.events_path(0), "rank0")
        memory = {"backward": PhaseMemory(peak_bytes=1 << 20)}
        writer.write(StepFinished(step=61, t=1e10, phase_memory=memory, in_use_only=True))
        writer.close()
    parts = {c.component: c.actual_bytes for c in build_report(run).components if not c.in_peak}
    assert any(parts.values())
    beside = {c.name: c.first for c in compare(run, run).changes if not c.in_peak}
    assert beside == {name: size for name, size in parts.items() if size is not None}


def test_a_run_against_itself_differs_in_nothing(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, kind="cuda", kernels=flash())
    found = compare(run, run)
    assert found.options == () and found.unfair == ("A and B are one run",)
    assert all(change.change in (0, None) for change in found.changes)
    assert all(row.first == row.second for row in found.ran)


def test_options_say_where_they_came_from(tmp_path: Path) -> None:
    found = compare(make_recorded_run(tmp_path, zero=2), make_recorded_run(tmp_path, zero=3, seed=5))
    assert {option.option: (option.first, option.second) for option in found.options} == {
        "zero": (2, 3),
        "seed": (0, 5),
    }
    assert {option.first_from and str(option.first_from.source) for option in found.options} == {"default"}


def test_losses_are_taken_at_the_last_step_that_both_have(tmp_path: Path) -> None:
    one, two = make_recorded_run(tmp_path, steps=20), make_recorded_run(tmp_path, steps=45)
    found = compare(one, two)
    assert found.loss_step == 20
    assert rows(found)["loss"].change == 0
    none = compare(one, make_recorded_run(tmp_path, steps=0, end="failed"))
    assert none.loss_step is None and rows(none)["loss"].first is None


def test_what_ran_is_shown_beside_what_the_modules_hold(tmp_path: Path) -> None:
    one = make_recorded_run(tmp_path, kind="cuda", kernels=flash(AttentionKernel.UNFUSED))
    two = make_recorded_run(tmp_path, kind="cuda", attention="flash_attention_2", kernels=flash())
    ran = {row.what: (row.first, row.second) for row in compare(one, two).ran}
    assert ran["attention"][1] == "FlashAttention-2"
    assert ran["attention in the modules"] == ("sdpa", "flash_attention_2")
    assert ran["optimizer"] == ("DeepSpeed's fused Adam", "DeepSpeed's fused Adam")
    assert ran["liger"] == (None, None)


def test_what_makes_it_unfair_is_said(tmp_path: Path) -> None:
    one = make_recorded_run(tmp_path, kind="cuda")
    two = make_recorded_run(tmp_path, kind="cuda", ranks=4, seq_len=512, steps=5, data="other.txt")
    reasons = "\n".join(compare(one, two).unfair)
    for words in (
        "numbers of ranks: 2 in A, 4 in B",
        "sequence lengths",
        "data",
        "B has only 3 steps to take",
    ):
        assert words in reasons
    starting = make_recorded_run(tmp_path, kind="cuda", steps=0, end=None)
    assert "B has finished no step: it is still starting" in compare(one, starting).unfair
    cpu = "\n".join(compare(one, make_recorded_run(tmp_path)).unfair)
    assert "different GPUs: h200 in A, cpu in B" in cpu and "different models" in cpu


def test_packages_that_one_run_lacks_are_named(tmp_path: Path) -> None:
    one, two = make_recorded_run(tmp_path), make_recorded_run(tmp_path)
    record = two.events_path("rank0")
    record.write_text(record.read_text().replace('"transformers":"5.24.0"', '"peft":"0.21.0"'))
    words = "different versions: transformers 5.24.0 in A, not there in B; peft not there in A, 0.21.0 in B"
    assert words in compare(one, two).unfair
    starting = make_recorded_run(tmp_path, steps=0, end=None)
    assert not any("not there" in reason for reason in compare(one, starting).unfair)


@pytest.mark.parametrize(
    "event",
    [
        ("rank0", BaselineMeasured(device_used_before_bytes=9 * GIB)),
        ("hardware", HardwareSampled(devices=(DeviceSample(index=0, process_count=3),))),
    ],
)
def test_strangers_on_the_device_are_told(tmp_path: Path, event: tuple[str, AnyEvent]) -> None:
    one, two = (make_recorded_run(tmp_path, kind="cuda", ranks=1) for _ in range(2))
    source, strange = event
    writer = EventWriter(two.events_path(source), source)
    writer.write(strange)
    writer.close()
    assert "other processes were on a device of B" in compare(one, two).unfair
    assert not any("of A" in reason for reason in compare(one, two).unfair)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_text_keeps_to_its_width_and_json_to_its_keys(tmp_path: Path, width: int) -> None:
    one = make_recorded_run(tmp_path, kind="cuda", kernels=flash(AttentionKernel.UNFUSED))
    two = make_recorded_run(
        tmp_path, kind="cuda", attention="flash_attention_2", liger=True, pace=0.5, kernels=flash()
    )
    found = compare(one, two)
    text = list(render(found, width))
    # A wide table of figures is never broken; 80 columns hold it.
    assert all(len(line) <= max(width, 74) for line in text), max(text, key=len)
    shown = "\n".join(text)
    assert "attention: sdpa (default) -> flash_attention_2 (default)" in shown
    assert "-50.0%" in shown and "loss at step 60" in shown
    plain = msgspec.json.decode(msgspec.json.encode(found))
    assert {"schema_version", "first", "second", "options", "changes", "ran", "unfair"} <= set(plain)
    for change in plain["changes"]:
        figures = {"first", "second", "change", "percent", "within_noise"}
        assert set(change) == {"name", "unit", "in_peak", *figures}


def test_a_changed_run_shows_all_its_settings(tmp_path: Path) -> None:
    changed = make_changed_run(tmp_path)
    plain = make_recorded_run(tmp_path, steps=36)
    found = compare(plain, changed)
    assert len(found.first.settings) == 1
    first, second, third = found.second.settings
    assert (first.options, second.options) == ({}, {"micro_batch": 8})
    assert third.options == {"gradient_checkpointing": True}
    assert [(s.first_step, s.last_step) for s in found.second.settings] == [(1, 12), (13, 24), (25, 36)]
    seconds = [setting.step_seconds for setting in found.second.settings]
    assert seconds == pytest.approx([0.4, 0.8, 1.6], rel=0.1)
    assert None not in [setting.peak_bytes for setting in found.second.settings]
    assert [option.option for option in found.options] == ["gradient_checkpointing", "micro_batch"]
    assert any("was changed while it ran" in reason for reason in found.unfair)
    text = "\n".join(render(found, 100))
    assert "Settings of B, in their order" in text and "Settings of A" not in text
    for words in ("as launched: ", "micro_batch=8: ", "gradient_checkpointing=on: 1.6"):
        assert words in text


def test_the_page_of_a_comparison(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    changed = make_changed_run(tmp_path)
    other = make_recorded_run(tmp_path, steps=36, data=evil, tokenizer="hf_" + "aB3d" * 8)
    page = read_compare_page(other, changed, Scrubber())
    parsed = require_harmless(page)
    assert evil in parsed.text and "aB3daB3d" not in page
    for words in ("Settings of B, in their order", "gradient_checkpointing", "peak memory", "B - A"):
        assert words in parsed.text
    plots = {str(a["aria-label"]) for name, a in parsed.elements if name == "svg"}
    assert {"Loss", "Step time", "Peak memory"} <= plots


@pytest.mark.parametrize("end", [None, "stopped"])
def test_a_run_that_is_starting_again_has_no_figures_of_the_moment(
    tmp_path: Path, end: RunEnd | None
) -> None:
    plain = make_recorded_run(tmp_path, steps=36)
    spec = recorded_spec("cpu", steps=36)
    run = RunDir.create(tmp_path, spec, recorded_prediction(spec), {})
    recorder = Recorder(run, spec, BEGAN)
    recorder.start()
    for step in range(1, 13):
        recorder.step(step)
    recorder.end("stopped", 12)
    recorder.time.advance(60.0)
    recorder.start(goes_on_after=8)
    if end is not None:
        recorder.supervisor.write(RunEnded(state=end, reason="asked"))
    else:
        run.write_supervisor_pid()
    found = compare(plain, run)
    for name in ("peak_bytes", "reserved_bytes", "host_bytes", "device_bytes"):
        assert rows(found)[name].second is None, name
    assert rows(found)["host_bytes"].first and rows(found)["step_seconds"].second
    why = "B went on after step 8 and has made no step since, so that its memory is not known"
    assert f"{why}; its speed is that of the steps before" in found.unfair
    told = " ".join(render_report(build_report(run), 100).split())
    assert "after step 8" in told and "after step 0" not in told
    assert "-> n/a" in told, "the loss of a lost step is not where it stands"
    assert run.add_setting(spec, recorded_prediction(spec), {}) == 1
    recorder.supervisor.write(ChangeAsked(setting=1, restage=True))
    recorder.supervisor.write(RestageBegan(setting=1, from_setting=0, last_step=8, world_size=2))
    found = compare(plain, run)
    recorder.close()
    assert (found.second.settings[-1].first_step, found.second.settings[-1].step_seconds) == (9, None)
    for name in ("step_seconds", "tokens_per_second"):
        assert rows(found)[name].second is None, name
    report = build_report(run)
    assert (report.step_seconds, report.tokens_per_second, report.mfu_percent) == (None, None, None)
    setting = run.spec(1), read_state(run), run.prediction(1)
    measured = measure(run.run_id, *setting)
    assert (measured.step_seconds, measured.timed_steps) == (None, 0), "other runs are compared with it"
    assert why in found.unfair, found.unfair
    changed = "B was changed while it ran: its options are those since step 9, and no step was made on them"
    assert changed in found.unfair


def test_a_run_that_goes_on_from_nothing_is_not_said_to_have_made_no_step(tmp_path: Path) -> None:
    plain = make_recorded_run(tmp_path, steps=36)
    spec = recorded_spec("cpu", steps=36)
    run = RunDir.create(tmp_path, spec, recorded_prediction(spec), {})
    with closing(Recorder(run, spec, BEGAN)) as recorder:
        recorder.start()
        for step in range(1, 13):
            recorder.step(step)
        recorder.end("stopped", 12)
        recorder.time.advance(60.0)
        recorder.start(goes_on_after=0)
        recorder.supervisor.write(RunEnded(state="stopped", reason="asked"))
    found = compare(plain, run)
    assert rows(found)["step_seconds"].second and not any("finished no step" in why for why in found.unfair)
    assert any(why.startswith("B went on and has made no step since") for why in found.unfair)

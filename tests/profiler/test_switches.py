"""Asked for, really on, and what it changed: from recorded runs, with the run that was compared named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.presets.spec import RunSpec
from llmtop.profiler.effects.compare import compare
from llmtop.profiler.effects.evidence import offload
from llmtop.profiler.effects.kernelnames import AttentionKernel
from llmtop.profiler.effects.load import load_words, others_percent
from llmtop.profiler.effects.switches import (
    SWITCHES,
    Switch,
    differing_switch,
    measure,
    read_others,
    switches,
)
from llmtop.profiler.findings.find import findings
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.rankstate import WARMUP_STEPS, RankState
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.fold.series import steady_steps
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.record.events import KernelsSeen, MemoryClassified, ModelBuilt, StepFinished
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.text import render
from tests.recorded import make_recorded_run
from tests.recorded_spec import recorded_prediction, recorded_spec

ON_GPU: dict[str, Any] = {
    "attention": AttentionKernel.SDPA_FLASH,
    "attention_calls": 32,
    "optimizer": "deepspeed_fused_adam",
}


def kernels(**fields: Any) -> KernelsSeen:
    return KernelsSeen(step=3, src="rank0", **{**ON_GPU, **fields})


def switches_of(run: RunDir) -> dict[str, Switch]:
    state, spec, prediction = read_state(run), run.spec(), run.prediction()
    own = measure(run.run_id, spec, state, prediction)
    found = switches(own, state.ranks.get(0), read_others(run, state.host))
    return {switch.key: switch for switch in found}


def seen(
    spec: RunSpec,
    built: dict[str, Any] | None = None,
    ran: KernelsSeen | None = None,
) -> dict[str, bool | None]:
    """Switch to whether it is on, for a rank that built and ran this."""
    model = ModelBuilt(params=100, trainable_params=100, **built) if built is not None else None
    rank = RankState(rank=0, model=model, kernels=ran)
    return {row.key: row.evidence(spec, rank).on for row in SWITCHES}


def test_the_change_is_that_against_the_run_that_differs_in_the_switch_alone(tmp_path: Path) -> None:
    other = make_recorded_run(tmp_path, kind="cuda", attention="eager", pace=2.0)
    make_recorded_run(tmp_path, kind="cuda", attention="eager", micro_batch=4)
    make_recorded_run(tmp_path, kind="cuda", attention="eager", seq_len=1024)
    make_recorded_run(tmp_path, kind="cuda", ranks=4, attention="eager")
    run = make_recorded_run(tmp_path, kind="cuda", steps=30, seed=7, learning_rate=1e-3, kernels=kernels())
    found = switches_of(run)
    attention = found["attention"]
    assert (attention.asked, attention.on) == ("sdpa", True)
    assert (attention.compared_run, attention.compared_setting) == (other.run_id, "eager")
    assert attention.step_percent == pytest.approx(-50, abs=1)
    assert attention.tokens_percent == pytest.approx(100, abs=2)
    assert attention.peak_bytes_change == 0
    for switch in (found["liger"], found["zero"]):
        assert switch.compared_run is None and switch.step_percent is None


def test_of_several_runs_the_one_without_the_switch_is_compared(tmp_path: Path) -> None:
    without = make_recorded_run(tmp_path, kind="cuda", zero=0)
    make_recorded_run(tmp_path, kind="cuda", zero=1)
    run = make_recorded_run(tmp_path, kind="cuda", zero=2)
    zero = switches_of(run)["zero"]
    assert (zero.compared_run, zero.compared_setting) == (without.run_id, "stage 0")


def test_without_such_a_run_nothing_is_measured_and_the_prediction_is_named_as_one(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, kind="cuda", gradient_checkpointing=True)
    found = switches_of(run)
    checkpointing = found["checkpointing"]
    assert checkpointing.compared_run is None and checkpointing.peak_bytes_change is None
    assert checkpointing.predicted_bytes_change is not None
    assert found["liger"].is_off and found["liger"].predicted_bytes_change is None
    text = " ".join(render(build_report(run)).split())
    assert "not measured: no run differs in it alone; predicted peak" in text


def test_the_predicted_change_is_of_one_predictor_whatever_the_record_says(tmp_path: Path) -> None:
    """The recorded prediction may be an older version's."""
    run = make_recorded_run(tmp_path, kind="cuda", gradient_checkpointing=True)
    spec = run.spec()
    without = replace(spec, options=replace(spec.options, gradient_checkpointing=False))
    expected = predict(spec).peak_allocated_bytes - predict(without).peak_allocated_bytes
    assert run.prediction().peak_allocated_bytes != predict(spec).peak_allocated_bytes
    assert switches_of(run)["checkpointing"].predicted_bytes_change == expected


def test_runs_of_another_machine_or_too_short_or_broken_say_nothing(tmp_path: Path) -> None:
    make_recorded_run(tmp_path, kind="cuda", attention="eager", steps=0, end=None)
    broken = make_recorded_run(tmp_path, kind="cuda", attention="eager")
    broken.spec_path.write_text("{")
    run = make_recorded_run(tmp_path, kind="cuda")
    assert read_others(run, read_state(run).host) == ()
    make_recorded_run(tmp_path, kind="cuda", attention="eager")
    assert len(read_others(run, read_state(run).host)) == 1
    assert read_others(run, "another-host") == ()


def test_few_steps_are_said(tmp_path: Path) -> None:
    make_recorded_run(tmp_path, kind="cuda", attention="eager", steps=6)
    attention = switches_of(make_recorded_run(tmp_path, kind="cuda"))["attention"]
    assert attention.step_percent is not None and "few steps" in attention.note


def with_load(run: RunDir, busy_percent: float) -> RunDir:
    """As if its machine had 32 processors, of which so many were busy, by its ranks or by others."""
    log = run.events_path("hardware")
    words = f'"cpu_percent":{busy_percent},"cpu_count":32,"disk'
    content, count = re.subn(r'"cpu_percent":91.0,"disk', words, log.read_text())
    assert count
    log.write_text(content)
    return run


@pytest.mark.parametrize(("there", "is_said"), [(35.0, True), (85.0, False)])
def test_a_step_time_that_may_be_the_load_of_the_machine_is_said(
    tmp_path: Path, there: float, is_said: bool
) -> None:
    other = with_load(make_recorded_run(tmp_path, attention="eager"), there)
    run = with_load(make_recorded_run(tmp_path, pace=5.0), 91.0)
    note = switches_of(run)["attention"].note
    # Two ranks use 97 % of a processor each, which is 6 % of all.
    words = "other programs used 85% and 29% of the processors"
    assert (words in note) is is_said and ("load" in note) is is_said
    unfair = compare(run, other).unfair
    assert (f"different load of the machine: in A and B {words}" in unfair) is is_said


@pytest.mark.parametrize(
    ("one", "other", "is_unlike"),
    [
        *((10.0, 27.0, False), (10.0, 31.0, True), (40.0, 55.0, False)),
        # Of what is left little is much.
        *((63.0, 80.0, True), (96.0, 99.0, False), (92.0, 100.0, True)),
    ],
)
def test_loads_are_unlike_by_what_they_leave_too(one: float, other: float, is_unlike: bool) -> None:
    assert bool(load_words(one, other)) is bool(load_words(other, one)) is is_unlike


def test_a_record_that_does_not_count_processors_tells_no_load(tmp_path: Path) -> None:
    assert others_percent(read_state(make_recorded_run(tmp_path))) is None


@given(
    st.sampled_from(
        [
            {"zero": 3},
            {"offload_optimizer": "cpu"},
            {"precision": "fp16"},
            {"attention": "flash_attention_2"},
            {"liger": True},
            {"gradient_checkpointing": True},
            {"optimizer": "adamw_8bit"},
            {"lora_rank": 8},
            {"micro_batch": 2},
            {"grad_accum": 4},
        ]
    ),
    st.sampled_from([{}, {"steps": 9}, {"seed": 3, "learning_rate": 1.0}, {"kernel_profile_step": 0}]),
)
def test_a_switch_is_found_from_both_sides_whatever_does_not_count(
    change: dict[str, Any], free: dict[str, Any]
) -> None:
    one, two = recorded_spec("cuda"), recorded_spec("cuda", **{"steps": 60, **change, **free})
    row = differing_switch(one, two)
    assert row is not None and set(change) <= set(row.options)
    assert differing_switch(two, one) == row
    assert differing_switch(one, one) is None
    assert differing_switch(one, replace(two, options=replace(two.options, threads_per_rank=5))) is None
    assert differing_switch(one, replace(two, model=replace(two.model, num_layers=1))) is None


def test_settings_that_are_off_do_not_count() -> None:
    one = recorded_spec("cuda")
    assert differing_switch(one, recorded_spec("cuda", liger_kernels="rms_norm", lora_alpha=3.0)) is None
    assert differing_switch(one, recorded_spec("cuda", checkpointing_every=4)) is None


def test_what_ran_decides_and_where_nothing_was_seen_the_modules_do() -> None:
    flash = recorded_spec("cuda", attention="flash_attention_2")
    assert seen(flash)["attention"] is None
    assert seen(flash, {"attention": "flash_attention_2"})["attention"] is None
    assert seen(flash, {"attention": "sdpa"})["attention"] is False
    assert seen(flash, {"attention": "flash_attention_2"}, kernels())["attention"] is False
    ran = kernels(attention=AttentionKernel.FLASH_2)
    assert seen(flash, {"attention": "flash_attention_2"}, ran)["attention"] is True


@pytest.mark.parametrize(
    ("kind", "options", "drive", "on", "words"),
    [
        (
            "cpu",
            {"offload_param": "nvme"},
            {"optimizer_state": 9 << 20},
            True,
            "optimizer state on NVMe (9.00 MiB)",
        ),
        ("cuda", {}, {"optimizer_state": 9 << 20}, True, "optimizer state on NVMe (9.00 MiB)"),
        ("cuda", {}, {}, False, "optimizer state not on NVMe"),
        ("cuda", {}, None, None, "what lies on the drive was not recorded"),
        ("cpu", {"offload_optimizer": "cpu"}, None, None, "all is in host RAM"),
        (
            "cpu",
            {"offload_optimizer": "none", "offload_param": "nvme"},
            {},
            False,
            "max_in_cpu leaves 1,000,000,000",
        ),
    ],
)
def test_files_on_the_drive_tell_an_offload_to_it(
    kind: Any, options: dict[str, Any], drive: dict[str, int] | None, on: bool | None, words: str
) -> None:
    asked = {"zero": 3, "offload_optimizer": "nvme", "nvme_path": "/nvme", **options}
    event = MemoryClassified(step=1, moment="between_steps", components={}, drive_components=drive)
    rank = RankState(rank=0, classified={event.moment: event})
    found = offload(recorded_spec(kind, **asked), rank)
    assert found.on is on and words in found.words


def test_the_weights_tell_the_precision() -> None:
    bf16 = recorded_spec("cuda", precision="bf16")
    assert seen(bf16)["precision"] is None
    assert seen(bf16, {})["precision"] is None
    assert seen(bf16, {"weights_type": "bf16"})["precision"] is True
    assert seen(bf16, {"weights_type": "fp32"})["precision"] is False
    autocast = replace(bf16.options, deepspeed={"torch_autocast": {"enabled": True}})
    assert seen(replace(bf16, options=autocast), {"weights_type": "fp32"})["precision"] is None


def test_a_profiler_that_did_not_look_is_not_one_that_saw_nothing() -> None:
    spec = recorded_spec(kind="cuda")
    model = ModelBuilt(params=100, trainable_params=100, attention=spec.options.attention)
    words = [
        {row.key: row.evidence(spec, RankState(rank=0, model=model, kernels=ran)).words for row in SWITCHES}
        for ran in (None, kernels(attention=None))
    ]
    assert "no step's kernels are recorded" in words[0]["attention"]
    assert "no kernel of it was recognised" in words[1]["attention"]
    assert words[0]["checkpointing"] == "no step's kernels are recorded"


def test_liger_kernels_are_looked_for_one_by_one() -> None:
    spec = recorded_spec("cuda", liger=True, liger_kernels="rms_norm,rope")
    assert seen(spec, {"liger": ("rms_norm", "rope")})["liger"] is True
    assert seen(spec, {"liger": ("rms_norm",)})["liger"] is False
    built = {"liger": ("rms_norm", "rope")}
    assert seen(spec, built, kernels(liger=("rms_norm", "rope")))["liger"] is True
    assert seen(spec, built, kernels(liger=("rms_norm",)))["liger"] is False
    assert seen(recorded_spec("cuda"), {"liger": ("rope",)})["liger"] is False


@pytest.mark.parametrize(
    ("asked", "built", "ran", "on"),
    [
        ("adamw", "FusedAdam", "deepspeed_fused_adam", True),
        ("adamw", "DeepSpeedCPUAdam", None, True),
        ("adamw", "AdamW", "torch_foreach_adam", False),
        ("adamw_torch", "AdamW", "torch_foreach_adam", True),
        ("adamw_8bit", "AdamW8bit", "bitsandbytes_8bit", True),
        ("paged_adamw_8bit", "AdamW8bit", "bitsandbytes_8bit", False),
        ("paged_adamw_32bit", "PagedAdamW32bit", "bitsandbytes_32bit", True),
        ("paged_adamw_32bit", "PagedAdamW32bit", "bitsandbytes_8bit", False),
    ],
)
def test_the_optimizer_is_told_by_class_and_kernel(asked: str, built: str, ran: str | None, on: bool) -> None:
    spec = recorded_spec("cuda", optimizer=asked)
    assert seen(spec, {"optimizer": built}, kernels(optimizer=ran))["optimizer"] is on


def test_recomputed_layers_show_in_the_forward_passes_of_attention() -> None:
    spec = recorded_spec("cuda", gradient_checkpointing=True)
    assert seen(spec, {}, kernels(attention_calls=64))["checkpointing"] is True
    assert seen(spec, {}, kernels(attention_calls=48))["checkpointing"] is True
    assert seen(spec, {}, kernels(attention_calls=32))["checkpointing"] is False
    assert seen(spec, {}, kernels(attention=None, attention_calls=0))["checkpointing"] is None
    assert seen(recorded_spec("cuda"), {}, kernels())["checkpointing"] is True


def test_packed_weights_and_adapters() -> None:
    spec = recorded_spec("cuda", quantization="nf4", lora_rank=8)
    packed = kernels(quantization=("4bit_dequantize",))
    assert seen(spec, {}, packed)["quantization"] is True
    assert seen(spec, {}, kernels())["quantization"] is False
    assert seen(spec, {}, packed)["lora"] is False  # all of it is trained
    assert seen(recorded_spec("cuda"), {}, packed)["lora"] is True


def found_keys(spec: RunSpec, *events: Any) -> dict[str, str]:
    state = fold(RunState(run_id="a-run"), events)
    return {f.key: f.evidence for f in findings(state, spec, recorded_prediction(spec)) if "not_on" in f.key}


def test_what_was_asked_for_and_did_not_run_is_a_warning_with_what_ran() -> None:
    built = ModelBuilt(
        src="rank0",
        params=1,
        trainable_params=1,
        attention="sdpa",
        optimizer="FusedAdam",
        liger=("rms_norm", "rope", "glu", "fused_linear_cross_entropy"),
    )
    spec = recorded_spec("cuda", liger=True, gradient_checkpointing=True)
    ran = kernels(attention=AttentionKernel.UNFUSED, liger=("rms_norm", "rope", "fused_linear_cross_entropy"))
    assert found_keys(spec) == {}
    found = found_keys(spec, built, ran)
    assert set(found) == {"attention_not_on", "liger_not_on", "checkpointing_not_on"}
    assert "softmax between matrix products" in found["attention_not_on"]
    assert found["liger_not_on"] == "glu not among the kernels that ran"
    good = kernels(liger=built.liger, attention_calls=64)
    assert found_keys(spec, built, good) == {}


def test_the_profiled_step_is_in_no_figure_of_speed(tmp_path: Path) -> None:
    plain = build_report(make_recorded_run(tmp_path, kind="cuda"))
    profiled = build_report(make_recorded_run(tmp_path, kind="cuda", kernels=kernels()))
    assert profiled.kernels is not None and profiled.kernels.attention == "sdpa_flash"
    assert plain.step_seconds == pytest.approx(profiled.step_seconds, rel=0.01)
    assert plain.tokens_per_second == pytest.approx(profiled.tokens_per_second, rel=0.01)
    assert [p.seconds for p in plain.phases] == pytest.approx([p.seconds for p in profiled.phases], rel=0.02)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 5))
def test_steady_steps_are_those_after_warmup_that_were_not_profiled(marks: list[bool], first: int) -> None:
    events = [
        StepFinished(step=first + at, src="rank0", step_seconds=1.0 + at, tokens=8, profiled=mark)
        for at, mark in enumerate(marks)
    ]
    series = fold(RunState(), events).series
    expected = [1.0 + at for at, mark in enumerate(marks) if at >= WARMUP_STEPS and not mark]
    assert [seconds for seconds, _ in steady_steps(series, WARMUP_STEPS)] == expected


@pytest.mark.parametrize(("pace", "noise"), [(1.005, True), (1.5, False)])
def test_a_change_of_speed_smaller_than_steps_differ_is_noise(
    pace: float, noise: bool, tmp_path: Path
) -> None:
    make_recorded_run(tmp_path, kind="cuda", attention="eager", pace=pace, steps=30)
    run = make_recorded_run(tmp_path, kind="cuda", steps=30)
    assert switches_of(run)["attention"].step_within_noise is noise
    text = " ".join(render(build_report(run)).split())
    assert ("(within noise)" in text) is noise
    assert "median after the first 2 steps, half of them" in text

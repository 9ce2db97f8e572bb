"""What a change comes to before it is made: keys, batch sizes, refusals and price."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.presets.errors import DoesNotFitError, UsageError
from llmtop.presets.rules import RULES
from llmtop.presets.spec import RunOptions, RunSpec
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.record.checkpointevents import CheckpointSaved
from llmtop.trainer.change.keys import FIXED, HOT, RESTAGE
from llmtop.trainer.change.plan import ChangePlan, plan_change, require_fit, require_words
from llmtop.trainer.change.price import price_of
from llmtop.trainer.change.restagefolder import state_bytes
from llmtop.trainer.change.setwords import set_words
from tests.recorded_spec import recorded_prediction, recorded_spec


def plan(*words: str, keep: bool = True, kind: Any = "cpu", **options: Any) -> ChangePlan:
    spec = recorded_spec(kind, **options)
    return plan_change(spec, recorded_prediction(spec), words, keep_global_batch=keep)


def test_every_option_is_changed_in_one_way_or_stays_for_a_reason() -> None:
    assert HOT | RESTAGE | set(FIXED) == set(RunOptions.__struct_fields__)
    assert len(HOT) + len(RESTAGE) + len(FIXED) == len(RunOptions.__struct_fields__)


@given(micro=st.integers(1, 12), accum=st.integers(1, 12), ranks=st.integers(1, 4), wanted=st.integers(1, 40))
def test_the_global_batch_is_kept_or_the_nearest_size_that_keeps_it_is_named(
    micro: int, accum: int, ranks: int, wanted: int
) -> None:
    def change(key: str, value: int) -> RunSpec | None:
        options = {"ranks": ranks, "micro_batch": micro, "grad_accum": accum}
        if value == options[key]:
            return None
        return plan(f"{key}={value}", **options).new  # type: ignore[arg-type]

    for key, other in (("micro_batch", "grad_accum"), ("grad_accum", "micro_batch")):
        try:
            new = change(key, wanted)
            assert new is None or new.global_batch == micro * accum * ranks
        except UsageError as error:
            assert (micro * accum) % wanted
            named = dict(word.split("=") for word in error.fix.split(";")[0].split(" with "))
            assert set(named) == {key, other}
            near = int(named[key])
            assert near * int(named[other]) == micro * accum
            divisors = [n for n in range(1, micro * accum + 1) if micro * accum % n == 0]
            assert abs(near - wanted) == min(abs(n - wanted) for n in divisors)


def test_both_sizes_or_a_word_change_the_global_batch() -> None:
    assert plan("micro_batch=8", "grad_accum=3").new.global_batch == 8 * 3 * 2
    assert plan("micro_batch=8", keep=False).new.global_batch == 8 * 2
    assert plan("micro_batch=3", keep=False).new.options.grad_accum == 1


def test_another_number_of_ranks_keeps_the_global_batch_too() -> None:
    new = plan("gpus=1", micro_batch=4, grad_accum=2).new
    assert (new.options.micro_batch, new.options.grad_accum, new.global_batch) == (4, 4, 16)


def test_one_key_that_takes_a_relaunch_makes_the_whole_change_one() -> None:
    found = plan("learning_rate=1e-4", "deepspeed.zero_optimization.reduce_bucket_size=2e6")
    assert found.restage
    assert {(c.key, c.new, c.restage) for c in found.changes} == {
        ("learning_rate", 1e-4, False),
        ("deepspeed.zero_optimization.reduce_bucket_size", 2_000_000, True),
    }
    assert found.deepspeed_config["zero_optimization"]["reduce_bucket_size"] == 2_000_000
    assert found.new.provenance["learning_rate"].detail == "llmtop set"
    assert not plan("learning-rate=1e-4", "gradient_checkpointing=on").restage


@pytest.mark.parametrize(
    ("word", "what", "fix"),
    [
        ("micro_batch", "not of the form KEY=VALUE", "micro_batch=2"),
        ("micro_batch=many", "micro_batch = 'many' is not valid", "a whole number"),
        ("zerro=3", "unknown key 'zerro'", "did you mean 'zero'?"),
        ("steps=5", "steps of a live run cannot be changed", ""),
        ("step=200", "unknown key 'step'", "did you mean 'steps'?"),
        ("lr=1e-4", "unknown key 'lr'", "did you mean 'learning_rate'?"),
        ("precision=bf16", "precision of a live run cannot be changed", ""),
        ("liger=on", "liger on the CPU", "liger=false"),
        ("deepspeed.zero_optimization.stage=3", "stage = 3, but zero = 2", "say it once"),
    ],
)
def test_what_cannot_be_is_told_before_anything_happens(word: str, what: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(word)
    assert what in str(caught.value) and fix in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("micro_batch=2", "micro-batch=4"),
        ("attention=eager", "attention=sdpa"),
        (
            "deepspeed.zero_optimization.reduce_bucket_size=1e6",
            "deepspeed.zero_optimization. reduce_bucket_size=2e6",
        ),
        (
            'deepspeed.zero_optimization={"reduce_bucket_size": 1000000}',
            "deepspeed.zero_optimization.reduce_bucket_size=2e6",
        ),
        (
            "deepspeed.zero_optimization.reduce_bucket_size=2e6",
            'deepspeed.zero_optimization={"reduce_bucket_size": 1000000}',
        ),
    ],
)
def test_a_key_that_is_told_twice_is_refused(first: str, second: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(first, "max_grad_norm=0.5", second)
    assert f"{second}: " in str(caught.value) and f"is told already by {first}" in str(caught.value)


def test_keys_beside_each_other_in_a_table_are_no_key_that_is_told_twice() -> None:
    keys = ("reduce_bucket_size", "allgather_bucket_size", "reduce_bucket_size_2")
    require_words([f"deepspeed.zero_optimization.{key}=2e6" for key in keys])


USUAL = "rope,rms_norm,swiglu,fused_linear_cross_entropy"
"""What Liger switches on for Llama."""


@pytest.mark.parametrize(
    ("word", "options", "why"),
    [
        ("nvme_path=/fast", {}, "nothing is offloaded to NVMe"),
        ("checkpointing_reentrant=on", {}, "nothing is recomputed"),
        (f"liger_kernels={USUAL}", {"liger": True}, "the same kernels run already"),
        ("deepspeed.disable_allgather=true", {}, "reads it nowhere"),
        ("deepspeed.steps_per_print=1000000000", {}, "DeepSpeed's configuration is the same"),
    ],
)
def test_ranks_are_not_started_again_for_nothing(word: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(word, kind="cuda", **options)
    assert "nothing would change" in str(caught.value) and why in str(caught.value)
    # Beside what does take a relaunch it does no harm.
    assert plan(word, "attention=eager", kind="cuda", **options).restage
    with pytest.raises(UsageError, match="nothing would change"):
        plan(word, "learning_rate=1e-4", kind="cuda", **options)


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("nvme_path=/fast", {"zero": 3, "offload_optimizer": "nvme", "nvme_path": "/slow"}),
        ("checkpointing_reentrant=on", {"gradient_checkpointing": True}),
        ("liger_kernels=rope", {"liger": True}),
        ("deepspeed.zero_optimization.reduce_bucket_size=1000000", {}),
    ],
)
def test_ranks_are_started_again_for_what_changes(word: str, options: dict[str, Any]) -> None:
    assert plan(word, kind="cuda", **options).restage


def test_a_schedule_of_deepspeeds_own_has_no_single_learning_rate() -> None:
    scheduler = {"scheduler": {"type": "WarmupLR", "params": {}}}
    with pytest.raises(UsageError, match="deepspeed.scheduler"):
        plan("learning_rate=1e-4", deepspeed=scheduler)


def test_a_setting_that_would_not_fit_is_refused_unless_forced() -> None:
    found = plan("micro_batch=512", keep=False, kind="cuda", seq_len=4096)
    assert found.new_prediction.fits is False
    with pytest.raises(DoesNotFitError) as caught:
        require_fit(found)
    assert "predicted not to fit" in str(caught.value) and caught.value.exit_code == 3
    require_fit(plan("micro_batch=2", kind="cuda", micro_batch=1, grad_accum=2))


def test_offload_that_this_machine_has_no_memory_for_is_refused_unless_forced() -> None:
    found = plan("offload_optimizer=cpu", kind="cuda")
    need = found.new_prediction.host_bytes
    assert found.new_prediction.fits and need > found.old_prediction.host_bytes
    with pytest.raises(DoesNotFitError, match="of host memory, and there is"):
        require_fit(found, need - 1)
    for limit in (need, None):
        require_fit(found, limit)
    # What the run holds already is there.
    require_fit(plan("micro_batch=2", kind="cuda", micro_batch=1, grad_accum=2), 1)


def test_the_price_of_a_relaunch_is_this_runs_start_up_and_what_is_saved() -> None:
    assert price_of(plan("micro_batch=2"), {}, None).down_seconds == 0.0
    found = plan("zero=3")
    assert price_of(found, {}, None).down_seconds is None, "nothing was measured yet"
    saved = CheckpointSaved(step=1, path="x", size_bytes=4_000, seconds=2.0)
    price = price_of(found, {"import": 5.0, "first_step": 2.0}, saved)
    assert price.state_bytes == 4_000 and price.measured
    assert price.down_seconds == pytest.approx(2 + 1 + 2 * 2), "the next ranks import while these train"


def test_a_state_holds_master_weights_and_moments_of_what_is_trained() -> None:
    spec = recorded_spec("cuda")
    prediction = predict(spec)
    assert state_bytes(spec, prediction) == 12 * prediction.params
    adapters = replace(spec, options=replace(spec.options, lora_rank=8))
    prediction = predict(adapters)
    assert state_bytes(adapters, prediction) == 12 * prediction.trainable_params


def test_reading_in_another_cut_is_told() -> None:
    assert "some of its text twice" in plan("seq_len=128").lost[0]
    assert plan("zero=3").lost == ()
    assert "rounded to 8 bits" in plan("optimizer=adamw_8bit").lost[0]
    assert "packed anew" in plan("zero=3", optimizer="adamw_8bit").lost[0]


@pytest.mark.parametrize("dropouts", [{"dropout": 0.1}, {"score_dropout": 0.1}, {}])
def test_dropout_of_either_kind_is_told_to_draw_anew_on_other_ranks(dropouts: dict[str, float]) -> None:
    spec = recorded_spec("cpu", micro_batch=4)
    spec = replace(spec, model=replace(spec.model, **dropouts))
    found = plan_change(spec, recorded_prediction(spec), ("gpus=1",), keep_global_batch=False)
    assert any("dropout" in one for one in found.lost) is bool(dropouts)


@pytest.mark.parametrize(
    ("launch", "change"),
    [
        ("--zero 3, or --offload-param none", "zero=3, or offload_param=none"),
        ("--no-liger, or --gpu NAME to plan for a GPU", "liger=false, or --gpu NAME to plan for a GPU"),
        (
            "--attention eager, or --attention sdpa where the family has it",
            "attention=eager, or attention=sdpa where the family has it",
        ),
        ("a smaller --micro-batch; --grad-accum makes", "a smaller micro_batch; grad_accum makes"),
        ("--liger-kernels with only one; x", "liger_kernels with only one; x"),
        ("--precision fp16, or --set deepspeed.x.y=fp16", "--precision fp16, or deepspeed.x.y=fp16"),
        ("pip install --no-build-isolation flash-attn", "pip install --no-build-isolation flash-attn"),
        ("--force changes it all the same", "--force changes it all the same"),
        (
            "--save-at-end or --checkpoint-every N saves, and llmtop stop RUN --save while it runs",
            "save_at_end=true or checkpoint_every=N saves, and llmtop stop RUN --save while it runs",
        ),
        ("raise --micro-batch from 2 to 4", "raise micro_batch from 2 to 4"),
    ],
)
def test_mends_are_told_in_the_words_of_a_change(launch: str, change: str) -> None:
    assert set_words(launch) == change


def test_no_mend_of_a_change_names_an_option_that_a_change_has_no_word_for() -> None:
    """Whatever the rules of a launch say, what is left of an option is one that a live run cannot change."""
    for rule in RULES:
        for option in re.findall(r"--(?:no-)?([a-z][a-z-]*)", set_words(rule.fix)):
            assert option.replace("-", "_") in FIXED, rule.fix

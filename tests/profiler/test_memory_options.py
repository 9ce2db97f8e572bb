"""Prediction of Liger's kernels one by one, and of checkpointing every k-th block."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.presets.catalog import load_gpu, load_model
from llmtop.presets.liger import LIGER
from llmtop.presets.rules import refusals
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.steptime import predict_step_seconds
from llmtop.profiler.effects.switches import SWITCHES
from llmtop.profiler.memory import backward
from llmtop.profiler.memory.backward import pass_bytes
from llmtop.profiler.memory.flush import blocks_before_flush
from llmtop.profiler.memory.loss import loss_bytes
from llmtop.profiler.memory.mask import mask_bytes
from llmtop.profiler.memory.predict import predict, predict_with_suggestions
from llmtop.profiler.memory.result import Component, Moment, Prediction
from llmtop.profiler.memory.sizes import sizes_of
from llmtop.profiler.memory.states import state_bytes
from llmtop.profiler.memory.walk import walk_of
from tests.profiler.test_memory import MODELS, make

ALL = "rms_norm,rope,glu,fused_linear_cross_entropy"


def peak(spec: RunSpec) -> int:
    return predict(spec).peak_allocated_bytes


def at(prediction: Prediction, moment: Moment) -> dict[Component, int]:
    return next(m.components for m in prediction.moments if m.name is moment)


def with_options(spec: RunSpec, **options: Any) -> RunSpec:
    return replace(spec, options=replace(spec.options, **options))


# --- Liger -----------------------------------------------------------------------------------------


def test_all_kernels_by_name_are_all_kernels() -> None:
    assert predict(make(liger=True, liger_kernels=ALL)) == predict(make(liger=True))
    assert predict(make(liger=True, liger_kernels=ALL)) != predict(make())


@pytest.mark.parametrize("kernel", ["rms_norm", "glu", "fused_linear_cross_entropy", "cross_entropy"])
def test_each_kernel_saves_its_own_part(kernel: str) -> None:
    plain, alone = make(micro_batch=4), make(micro_batch=4, liger=True, liger_kernels=kernel)
    before, after = (at(predict(spec), Moment.FORWARD_END) for spec in (plain, alone))
    tokens, model = 4 * 2048, plain.model
    layers, hidden = model.num_layers, model.hidden_size
    saved = before[Component.ACTIVATIONS] - after[Component.ACTIVATIONS]
    if kernel == "rms_norm":
        # Two norms a block and the last one: fp32 input and normalized value against the input alone.
        assert saved == (2 * layers + 1) * tokens * hidden * 4
    if kernel == "glu":
        assert saved == layers * tokens * model.intermediate_size * 2  # the activated gate
    if kernel == "fused_linear_cross_entropy":
        assert Component.LOGITS not in after
    if kernel == "cross_entropy":
        assert saved == 0
    # Kept is the fp32 gradient in place of the log-softmax; what backward adds is less.
    logits = [at(predict(spec), Moment.LOSS_BACKWARD).get(Component.LOGITS, 0) for spec in (plain, alone)]
    elements = tokens * model.vocab_size
    if kernel == "cross_entropy":
        assert logits == [12 * elements, 6 * elements]
        assert after[Component.LOGITS] == 4 * elements
    else:
        assert (logits[0] == logits[1]) is (kernel in ("rms_norm", "glu"))


def test_ligers_loss_in_fp32_makes_nothing_beside_the_logits() -> None:
    spec = make("llama-3.2-1b", precision="fp32", liger=True, liger_kernels="cross_entropy")
    loss, elements = loss_bytes(spec, sizes_of(spec)), 2048 * spec.model.vocab_size
    assert (loss.kept, loss.forward_peak, loss.backward_peak) == (4 * elements,) * 3


def test_rotary_by_liger_spares_a_copy_where_the_code_joins_parts() -> None:
    def spared(model: str) -> int:
        plain, rotated = make(model), make(model, liger=True, liger_kernels="rope")
        kept = [at(predict(spec), Moment.FORWARD_END)[Component.ACTIVATIONS] for spec in (plain, rotated)]
        return kept[0] - kept[1]

    phi = load_model("phi-4").shape
    assert spared("phi-4") == phi.num_layers * 2048 * phi.num_heads * phi.head_dim * 2
    assert spared("llama-3.1-8b") == 0


def test_granite_has_logits_under_liger_by_default() -> None:
    spec = make(liger=True)
    granite = replace(spec, model=replace(spec.model, family="granite"))
    assert at(predict(granite), Moment.FORWARD_END)[Component.LOGITS] > 0
    assert Component.LOGITS not in at(predict(spec), Moment.FORWARD_END)


def test_experts_as_a_whole_keep_gate_and_up_alone() -> None:
    plain, fused = (
        at(predict(make("mixtral-8x7b", liger=True, liger_kernels=k)), Moment.FORWARD_END)
        for k in ("rope", "rope,glu")
    )
    # Two experts a token: half of the four wide tensors, and two hidden ones, are gone.
    gone = 2 * (2 * 14336 + 2 * 4096) * 2
    assert plain[Component.ACTIVATIONS] - fused[Component.ACTIVATIONS] == 32 * 2048 * gone


@pytest.mark.parametrize("family", LIGER)
def test_no_kernel_of_a_family_needs_more(family: str) -> None:
    base = make("llama-3.2-1b", micro_batch=4)
    base = replace(base, model=replace(base.model, family=family))
    for kernel in LIGER[family].kernels:
        assert peak(with_options(base, liger=True, liger_kernels=kernel)) <= peak(base)


# --- every k-th block ------------------------------------------------------------------------------


@st.composite
def checkpointed(draw: st.DrawFn) -> RunSpec:
    spec = make(
        draw(st.sampled_from(MODELS)),
        zero=draw(st.integers(0, 3)),
        gpus=draw(st.sampled_from([1, 2, 8])),
        precision=draw(st.sampled_from(["bf16", "fp32"])),
        attention=draw(st.sampled_from(["eager", "sdpa"])),
        liger=draw(st.booleans()),
        gradient_checkpointing=True,
        lora_rank=draw(st.sampled_from([0, 0, 16])),
        micro_batch=draw(st.sampled_from([1, 4, 16])),
        seq_len=draw(st.sampled_from([128, 1024])),
        deepspeed={
            "zero_optimization": {"reduce_bucket_size": draw(st.sampled_from([10**6, 10**8, 5 * 10**8]))}
        },
    )
    every = draw(st.integers(1, spec.model.num_layers))
    return with_options(spec, checkpointing_every=every, checkpointing_reentrant=draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(checkpointed())
def test_no_block_needs_more_than_the_largest_that_was_looked_at(spec: RunSpec) -> None:
    """All blocks one by one, against the few where the prediction looks."""
    sizes = sizes_of(spec)
    states = state_bytes(spec, sizes)
    walk = walk_of(spec, sizes, states)
    before = blocks_before_flush(walk)
    totals = [
        sum(backward._at_block(walk, done, flushed=sizes.stage == 2 and done > before).values())
        for done in range(spec.model.num_layers)
    ]
    assert sum(pass_bytes(spec, sizes, states).last_block.values()) >= max(totals)


@settings(max_examples=100, deadline=None)
@given(checkpointed())
def test_it_lies_between_all_and_none(spec: RunSpec) -> None:
    plain = with_options(spec, checkpointing_reentrant=False)
    every = with_options(plain, checkpointing_every=1)
    none = with_options(every, gradient_checkpointing=False)
    assert peak(every) <= peak(plain)
    # Checkpoints hold the mask to the end, where nothing else may be left of the forward pass.
    assert peak(plain) <= peak(none) + mask_bytes(plain, sizes_of(plain))
    seconds = [predict_step_seconds(one) for one in (none, plain, every)]
    assert seconds == sorted(seconds, key=lambda value: value or 0.0)


def test_forward_keeps_inputs_of_some_and_all_of_the_others() -> None:
    spec = make("llama-3.2-1b", micro_batch=2)
    layers, tokens, hidden = 16, 2 * 2048, spec.model.hidden_size
    none = at(predict(spec), Moment.FORWARD_END)[Component.ACTIVATIONS]
    all_of_them, third = (
        at(
            predict(with_options(spec, gradient_checkpointing=True, checkpointing_every=k)),
            Moment.FORWARD_END,
        )
        for k in (1, 3)
    )
    block = (none - all_of_them[Component.ACTIVATIONS]) // layers + tokens * hidden * 2
    assert third[Component.ACTIVATIONS] == none - 6 * (block - tokens * hidden * 2)


def test_a_run_that_is_a_little_too_large_is_told_to_recompute_some_layers() -> None:
    spec = make("llama-3.2-1b", gpu="h200", micro_batch=16, liger=True, zero=1)
    needed = predict(spec).needed_bytes
    assert needed is not None
    small = replace(spec, gpu=replace(load_gpu("h200"), memory_bytes=int(needed * 0.8)))
    found = predict_with_suggestions(small).suggestions
    some = [s for s in found if isinstance(k := s.change.get("checkpointing_every"), int) and k > 1]
    assert some and some[0].fits
    # Recomputing all fits too, and costs more.
    assert not any(s.change.get("checkpointing_every") == 1 for s in found)


def test_a_run_with_some_room_is_told_to_recompute_less() -> None:
    spec = make("llama-3.1-8b", micro_batch=8, liger=True, zero=3, gpus=8, gradient_checkpointing=True)
    none = with_options(spec, gradient_checkpointing=False)
    fewer = with_options(spec, checkpointing_every=2)
    needs = predict(fewer).needed_bytes, predict(none).needed_bytes
    assert needs[0] is not None and needs[1] is not None and needs[0] < needs[1]
    between = replace(spec, gpu=replace(spec.gpu, memory_bytes=(needs[0] + needs[1]) // 2))
    changes = [suggestion.change for suggestion in predict_with_suggestions(between).suggestions]
    assert {"checkpointing_every": 4} in changes or {"checkpointing_every": 2} in changes
    assert load_model("llama-3.1-8b").shape.num_layers == 32


def test_a_switch_that_is_taken_back_leaves_nothing_that_is_refused() -> None:
    spec = make(
        liger=True, liger_kernels="rope,glu", gradient_checkpointing=True, checkpointing_every=2, zero=1
    )
    assert refusals(spec) == ()
    for row in SWITCHES:
        if row.key in ("liger", "checkpointing"):
            assert refusals(with_options(spec, **row.off)) == ()

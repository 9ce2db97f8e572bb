"""Predicted components bear the names that a trace of the allocator gives to the same bytes."""

from __future__ import annotations

from hypothesis import given, settings

from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.shape import param_count
from llmtop.profiler.memory.loss import liger_chunk_tokens
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.memory.result import Component, Moment
from llmtop.profiler.memory.states import cublas_workspace
from tests.profiler.test_memory import make, specs

HEAD = 128_256 * 4096
TOKENS, HIDDEN = 2048, 4096


def at(spec: RunSpec, moment: Moment) -> dict[Component, int]:
    found = next(m.components for m in predict(spec).moments if m.name is moment)
    return dict.fromkeys(Component, 0) | found


@settings(max_examples=100, deadline=None)
@given(specs())
def test_components_add_up_to_the_moment_and_the_largest_moment_is_the_peak(spec: RunSpec) -> None:
    prediction = predict(spec)
    for moment in prediction.moments:
        assert moment.total_bytes == sum(moment.components.values())
        assert min(moment.components.values()) > 0
    totals = {moment.name: moment.total_bytes for moment in prediction.moments}
    assert prediction.peak_allocated_bytes == totals[prediction.peak_moment]
    assert totals[prediction.peak_moment] == max(size for name, size in totals.items() if name != "init")


def test_gradients_alive_in_the_optimizer_step_are_gradients() -> None:
    """ZeRO-2 on one GPU: 16-bit gradients and their fp32 copy; the flat 16-bit copy between them is not."""
    spec = make(zero=2)
    held, params = at(spec, Moment.OPTIMIZER_STEP), param_count(spec.model)
    assert held[Component.GRADIENTS] == (2 + 4) * params
    assert held[Component.WORKSPACE] == 2 * params + cublas_workspace(spec)


def test_a_temporary_of_the_optimizer_is_no_larger_than_the_gradients_gone_by_then() -> None:
    """torch's AdamW makes one in fp32; the earlier of two equal states is the one that is named."""
    spec = make(zero=2, optimizer="adamw_torch")
    assert at(spec, Moment.OPTIMIZER_STEP) == at(make(zero=2), Moment.OPTIMIZER_STEP)


def test_stage_0_casts_tensor_by_tensor_before_it_flattens() -> None:
    spec = make(zero=0)
    held, params = at(spec, Moment.OPTIMIZER_STEP), param_count(spec.model)
    assert held[Component.GRADIENTS] == (2 + 4) * params
    assert held[Component.WORKSPACE] == 4 * params + cublas_workspace(spec)


def test_ligers_fused_loss_makes_the_heads_gradient_in_the_forward_pass() -> None:
    spec = make(zero=2, liger=True)
    kept, worst = at(spec, Moment.FORWARD_END), at(spec, Moment.LOSS_BACKWARD)
    assert kept[Component.GRADIENTS] == worst[Component.GRADIENTS] == 2 * HEAD
    assert kept[Component.LOGITS] == 0
    chunk = liger_chunk_tokens(TOKENS, 128_256, HIDDEN)
    assert worst[Component.LOGITS] == 2 * chunk * 128_256
    # The gradient of the head's input is kept; the input itself is not.
    assert worst[Component.ACTIVATIONS] == kept[Component.ACTIVATIONS]
    assert worst[Component.WORKSPACE] == cublas_workspace(spec) + 2 * TOKENS * HIDDEN


def test_at_the_loss_all_copies_of_the_logits_are_logits() -> None:
    held = at(make(zero=2), Moment.LOSS_BACKWARD)
    assert held[Component.LOGITS] == 12 * TOKENS * 128_256


def test_a_recomputed_block_is_activations_and_what_nobody_saves_of_it_workspace() -> None:
    plain, reentrant = (
        at(make(zero=3, gradient_checkpointing=True, checkpointing_reentrant=on), Moment.LAST_BLOCK_BACKWARD)
        for on in (False, True)
    )
    assert plain[Component.ACTIVATIONS] == reentrant[Component.ACTIVATIONS]
    # Its output.
    assert reentrant[Component.WORKSPACE] - plain[Component.WORKSPACE] == 2 * TOKENS * HIDDEN


def test_at_the_end_of_backward_only_inputs_are_still_saved() -> None:
    held = at(make(zero=2), Moment.FIRST_BLOCK_BACKWARD)
    assert held[Component.ACTIVATIONS] == TOKENS * (8 + 2 * 128 * 2)
    assert held[Component.WORKSPACE] == cublas_workspace(make()) + 2 * TOKENS * HIDDEN


def test_gathered_weights_are_parameters_and_buckets_are_buffers() -> None:
    spec = make(zero=3, gpus=2)
    held = at(spec, Moment.FORWARD_END)
    assert held[Component.PARAMETERS] > param_count(spec.model)  # this rank's half, 2 bytes each
    assert held[Component.COMMUNICATION_BUFFERS] > 0
    assert at(make(zero=2), Moment.LAST_BLOCK_BACKWARD)[Component.COMMUNICATION_BUFFERS] == 2 * 500_000_000

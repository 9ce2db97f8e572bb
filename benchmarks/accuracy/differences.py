"""What the code of a published row kept otherwise than the versions that the formulas follow, in bytes.

`data/published.jsonl` names the differences of each row, `data/differences.jsonl` says why each is taken and
where that was read. Every one is counted from the model's shape; no row's own measurement enters. They were
written after the disagreements had been seen, so G6 is judged without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.result import Moment, Prediction
from llmtop.profiler.memory.sizes import Sizes, sizes_of

Added = Callable[[RunSpec, Sizes], int]


def _logits(spec: RunSpec, sizes: Sizes) -> int:
    return spec.model.vocab_size * sizes.tokens


def _packed_inputs(spec: RunSpec, sizes: Sizes) -> int:
    """Inputs of attention's and the MLP's matrices in blocks that are not recomputed; attention's output is
    kept anyway, by the attention, and so is the input of matrices with an adapter."""
    model, layers = spec.model, spec.model.num_layers
    if spec.options.gradient_checkpointing:
        return 0  # at the loss only the blocks' own inputs are there
    into_mlp = 0 if model.parallel_block and model.norms_per_layer == 1 else model.hidden_size
    return layers * (into_mlp + model.intermediate_size) * sizes.dtype_bytes * sizes.tokens


DIFFERENCES: dict[str, Added] = {
    "packed_inputs_kept": _packed_inputs,
    "logits_alive_in_fp32": lambda spec, sizes: 4 * _logits(spec, sizes),
    "logits_alive_in_16_bits": lambda spec, sizes: 2 * _logits(spec, sizes),
    # Twice 2 bytes, the logits and their log-softmax, where the plain path holds 12.
    "chunked_16_bit_loss": lambda spec, sizes: -8 * _logits(spec, sizes),
    # A master of 4 bytes and two moments of 4, where two of 2 are left.
    "adapters_all_in_16_bits": lambda spec, sizes: -8 * sizes.trainable,
}


def added_bytes(names: Sequence[str], spec: RunSpec, prediction: Prediction) -> int:
    """At the peak of the run, where that is the loss; these differences are of that moment.

    What takes the loss below another moment leaves that one as the peak.
    """
    moments = prediction.moments[1:]
    at_loss = next(moment.total_bytes for moment in moments if moment.name is Moment.LOSS_BACKWARD)
    others = max(moment.total_bytes for moment in moments if moment.name is not Moment.LOSS_BACKWARD)
    sizes = sizes_of(spec)
    changed = at_loss + sum(DIFFERENCES[name](spec, sizes) for name in names)
    return max(changed, others) - prediction.peak_allocated_bytes

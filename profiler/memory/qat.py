"""What fake quantization keeps for the backward pass, makes on the way, and leaves in its modules.

From torchao 0.18 `quantization/qat/fake_quantizer.py:IntxFakeQuantizer` and `quant_primitives.py:
_do_fake_quantize_affine`, held to what torch's autograd keeps of it: of each matrix the rounded numbers
before they are cut to 4 bits (for the mask of the gradient) and the weight that the product is made with,
both in the weight's own type, and the scales with their inverses. Inputs that are rounded too are kept in the
same two forms, for each matrix anew, and their own scales; the plain input is then not kept for the product.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct

from llmtop.presets.spec import ModelShape, RunSpec
from llmtop.profiler.cost.shape import Role
from llmtop.profiler.memory.lora import linear

_COPIES = 2
"""Of a weight, and of an input: before the cut, and after."""
_SCALES = 2
"""A scale and its inverse."""
_ZERO_POINT_BYTES = 4
"""int32, which the module keeps beside its scales until the next pass."""


class QatBytes(Struct, frozen=True, kw_only=True):
    block_saved: int = 0
    """Of one block, whatever the tokens: copies of its matrices."""
    token_saved: int = 0
    """Of one block for each token, beyond what plain linear layers keep."""
    mlp_freed: int = 0
    """Of `block_saved`, the copies of the MLP's last matrix, which is differentiated first."""
    attention_freed: int = 0
    """Of `block_saved`, those of the whole MLP."""


NONE = QatBytes()


def qat_bytes(spec: RunSpec, dtype_bytes: int, *, output_copied: bool) -> QatBytes:
    """All zero for a run without it. `output_copied`: the last product of the attention keeps an input that
    the attention itself does not."""
    kind, group = spec.options.qat, spec.options.qat_group
    if kind == "none":
        return NONE
    model = spec.model
    weights, columns = _matrices(model)
    width = dtype_bytes
    token = _input_bytes(model, columns, output_copied) * width if kind == "int8-int4" else 0
    return QatBytes(
        block_saved=(_COPIES * weights + _SCALES * (weights // group)) * width,
        token_saved=token,
        mlp_freed=_COPIES * model.hidden_size * model.intermediate_size * width,
        attention_freed=_COPIES * _mlp_weights(model) * width,
    )


def qat_scales(spec: RunSpec, dtype_bytes: int) -> int:
    """Bytes of the scales and zero points in all modules, from the first pass on."""
    if spec.options.qat == "none":
        return 0
    weights, _ = _matrices(spec.model)
    return spec.model.num_layers * (weights // spec.options.qat_group) * (dtype_bytes + _ZERO_POINT_BYTES)


@lru_cache(maxsize=1024)
def _matrices(model: ModelShape) -> tuple[int, int]:
    """Of one block: weights of its matrices, and inputs of all of them together."""
    groups = linear(model)
    each = [(group.numel, group.shape[-1], group.count // model.num_layers) for group in groups]
    weights = sum(numel * count for numel, _, count in each)
    columns = sum(inputs * count for _, inputs, count in each)
    return weights, columns


def _mlp_weights(model: ModelShape) -> int:
    groups = [group for group in linear(model) if group.role is Role.MLP]
    return sum(group.numel * (group.count // model.num_layers) for group in groups)


def _matrix_count(model: ModelShape) -> int:
    return sum(group.count // model.num_layers for group in linear(model))


def _input_bytes(model: ModelShape, columns: int, output_copied: bool) -> int:
    """Numbers of the rounded inputs of every matrix, without the plain ones that nobody else keeps: outputs
    of the block's norms, what attention gives to its last matrix, and the MLP's product."""
    plain = 2 * model.hidden_size if model.norms_per_layer != 1 else model.hidden_size
    plain += model.num_heads * model.head_dim if output_copied else 0
    # ReLU keeps what it gives.
    plain += model.intermediate_size if model.activation != "relu" or model.gated_mlp else 0
    return _COPIES * columns + _SCALES * _matrix_count(model) - plain


_FORWARD_PASSES, _BACKWARD_PASSES = 14, 10
"""Times that a matrix crosses memory while it is rounded (smallest and largest, five elementwise operations
that read and write), and on the gradient's way back: counted in torchao's code, not measured on a GPU."""


def rounding_traffic(spec: RunSpec, dtype_bytes: int) -> float:
    """Bytes that the rounding of weights moves through memory in one optimizer step."""
    options = spec.options
    if options.qat == "none":
        return 0.0
    weights, _ = _matrices(spec.model)
    again = _FORWARD_PASSES / options.checkpointing_every if options.gradient_checkpointing else 0.0
    passes = _FORWARD_PASSES + again + _BACKWARD_PASSES
    return passes * weights * spec.model.num_layers * dtype_bytes * options.grad_accum

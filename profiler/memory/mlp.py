"""Bytes that a block's MLP, dense or of experts, keeps for its backward pass, and what that needs on top.

Counted as in `blocks.py`: tensor by tensor from the modelling code of transformers 5.x, per token.
"""

from __future__ import annotations

from llmtop.presets.liger import FUSED_EXPERTS
from llmtop.presets.spec import ModelShape, MoeShape, RunSpec
from llmtop.profiler.memory.sizes import Sizes

ROUTED_IN_FP32 = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe"})
"""Families whose router casts its input, and its own weight, to fp32."""


PYTHON_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh_python")
"""Written as Python arithmetic."""


def mlp_copies(model: ModelShape, sizes: Sizes) -> int:
    """How many tensors of the MLP's width are kept."""
    if model.gated_mlp:
        # gate, up, activated gate, product; Liger recomputes the activation.
        return 3 if "glu" in sizes.liger else 4
    if model.activation == "relu":
        return 1
    if model.activation in PYTHON_GELU:
        # Input, its half, tanh, 1 + tanh, and the product.
        return 5
    return 2


def mlp_saved(spec: RunSpec, sizes: Sizes) -> int:
    """What the MLP keeps; of a model with dense and sparse blocks the mean."""
    model, width = spec.model, sizes.dtype_bytes
    copies = mlp_copies(model, sizes)
    if not sizes.mlp_adapted and model.activation != "relu":
        copies -= 1  # the product is kept only for the gradient of the last matrix; ReLU's for its own
    dense = copies * model.intermediate_size * width
    if model.moe is None:
        return dense
    moe = model.moe
    shared = copies * moe.shared_intermediate_size * width
    if moe.shared_gate:
        shared += (
            model.hidden_size + 1
        ) * width  # the gate is multiplied with what the shared expert returns
    sparse = _routed_saved(model, moe, sizes) + shared + _router_saved(model, moe, sizes)
    blend = moe.first_dense_layers / model.num_layers
    return round(dense * blend + sparse * (1 - blend))


def _routed_saved(model: ModelShape, moe: MoeShape, sizes: Sizes) -> int:
    """Each token's experts keep gathered input, gate, up, activation, product and weighted output.

    Adapters sit on none of them: frozen experts keep neither their input nor the product.
    """
    if fused_experts(model, sizes):
        return moe.experts_per_token * 2 * moe.expert_intermediate_size * sizes.dtype_bytes
    # gpt-oss limits gate and up, and writes its activation as arithmetic: gate and up as they were, the gate
    # within its limit, its sigmoid, their product, up + 1, and the product of all.
    inner = 7 if model.family == "gpt_oss" else 4
    frozen = 1 if sizes.lora_rank else 0
    elements = (inner - frozen) * moe.expert_intermediate_size + (2 - frozen) * model.hidden_size
    return experts_run(model, moe) * elements * sizes.dtype_bytes


def experts_run(model: ModelShape, moe: MoeShape) -> int:
    """Experts that a token goes through: in Llama-4's code all of them, those not chosen with zeros."""
    return moe.num_experts if model.family == "llama4_text" else moe.experts_per_token


def _router_saved(model: ModelShape, moe: MoeShape, sizes: Sizes) -> int:
    """Scores of all experts, places and weights of the chosen ones; where it casts, its input and weight."""
    scores = 0 if model.family in ("gpt_oss", "granitemoe") else 4 * moe.num_experts
    chosen = 36 * moe.experts_per_token
    if model.family not in ROUTED_IN_FP32 or sizes.dtype_bytes == 4:
        return scores + chosen
    # A frozen weight needs no input.
    inputs = 0 if sizes.lora_rank else sizes.tokens
    return scores + chosen + 4 * model.hidden_size * (inputs + moe.num_experts) // sizes.tokens


def experts_backward(spec: RunSpec, sizes: Sizes) -> tuple[int, int]:
    """Transient and already freed bytes per token while the experts' first tensor gets its gradient, which is
    there whole: the gradients of gate, up and gathered input are, what was kept of the MLP but the input not.

    Liger's one call keeps all until it is over: the product beside them, and the gradient of its input.
    """
    model, width = spec.model, sizes.dtype_bytes
    if model.moe is None:
        return 0, 0
    inner, hidden = model.moe.expert_intermediate_size, model.hidden_size
    chosen = experts_run(model, model.moe)
    if fused_experts(model, sizes):
        return (chosen * (3 * inner + hidden) + hidden) * width, 0
    transient = chosen * (2 * inner + hidden) * width
    return transient, _routed_saved(model, model.moe, sizes) - chosen * hidden * width


def experts_gradient(spec: RunSpec, sizes: Sizes) -> int:
    """Elements of the experts' gradients that are there then: Liger's call makes both, of frozen weights too
    (liger-kernel 0.8.5, `ops/fused_moe.py:LigerFusedMoEFunction.backward`)."""
    if fused_experts(spec.model, sizes):
        return sizes.experts
    return 0 if sizes.lora_rank else sizes.expert_tensor


def fused_experts(model: ModelShape, sizes: Sizes) -> bool:
    """Liger's experts keep gate and up alone: liger-kernel 0.8.5, `ops/fused_moe.py`."""
    return model.moe is not None and "glu" in sizes.liger and model.family in FUSED_EXPERTS


def product_width(model: ModelShape) -> int:
    """Inputs of the MLP's last matrix, of the shared expert's in a block with experts."""
    return model.intermediate_size if model.moe is None else model.moe.shared_intermediate_size


def _mlp_width(model: ModelShape) -> int:
    """The widest intermediate that exists at once for a token."""
    if model.moe is None:
        return model.intermediate_size
    moe = model.moe
    return max(
        model.intermediate_size if moe.first_dense_layers else 0,
        experts_run(model, moe) * moe.expert_intermediate_size + moe.shared_intermediate_size,
    )


def mlp_backward(spec: RunSpec, sizes: Sizes) -> tuple[int, int]:
    """Transient and already freed bytes per token at the peak of the MLP's backward.

    Plain code: gradients of product, activation and up are alive while the product is gone. Liger writes
    its gradients over gate and up, so only the product's gradient is new; an adapter adds one more.
    """
    model, width = spec.model, sizes.dtype_bytes
    inner = _mlp_width(model) * width
    if sizes.lora_rank:
        # Of adapter and base the gradients of the input, and their sum. That input itself is gone by then,
        # but where the graph of 8-bit matrices keeps it, which non-reentrant checkpoints do not recompute.
        options = spec.options
        recomputed = bool(sizes.checkpoint_every) and not options.checkpointing_reentrant
        return (3 if options.quantization == "int8" and not recomputed else 2) * inner, 0
    if not model.gated_mlp:
        return inner, 0
    if fused_experts(model, sizes):
        return 3 * inner, 0
    if "glu" in sizes.liger:
        return inner, 0
    return 3 * inner, inner

"""What each formula's terms are, and where its rule was read or measured; by the function that has it.

Words alone: the arithmetic stays in the functions, which are followed as they compute (`explain_numbers`).
"""

from __future__ import annotations

from typing import NamedTuple

from llmtop.presets.spec import RunOptions


class Rule(NamedTuple):
    label: str
    """What its terms are; empty where the component says it."""
    source: str


_ZERO12 = "deepspeed 0.19.8 runtime/zero/stage_1_and_2.py"
_ZERO3 = "deepspeed 0.19.8 runtime/zero/stage3.py, partition_parameters.py"
_SWAP = "deepspeed 0.19.8 runtime/swap_tensor/, zero/stage3.py"
_AUTOGRAD = "transformers 5.x modelling code and what torch's autograd saves of it"
_QAT = "torchao 0.18 quantization/quant_primitives.py:_do_fake_quantize_affine"
_MEASURED = "measured on H200 (torch 2.11)"
_FLAT_COPY = "deepspeed 0.19.8 runtime/comm/coalesced_collectives.py, zero/stage3.py:partition_grads"
_WALK = "order of torch's backward pass; deepspeed 0.19.8 runtime/zero/stage_1_and_2.py for its buckets"

RULES: dict[str, Rule] = {
    "states._stage0": Rule("", "deepspeed 0.19.8 runtime/fp16/fused_optimizer.py, unfused_optimizer.py"),
    "states._stage12": Rule("", _ZERO12),
    "states._stage3": Rule("", _ZERO3),
    "states._optimizer_bytes": Rule(
        "Adam's two moments", "Adam, arXiv 1412.6980; in 8 bits bitsandbytes 0.50 optim/optimizer.py"
    ),
    "states.cublas_workspace": Rule(
        "cuBLAS workspaces", "torch aten/src/ATen/cuda/CublasHandlePool.cpp:parseChosenWorkspaceSize"
    ),
    "states.sub_group_elements": Rule("one sub-group", f"{_ZERO3}: sub_group_size"),
    "states.gathered_elements": Rule(
        "gathered weights",
        "deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py:fetch_sub_module",
    ),
    "states._kept_whole": Rule(
        "small weights that stay whole",
        "deepspeed 0.19.8 runtime/zero/parameter_offload.py:mark_persistent_parameters",
    ),
    "states._stage3_shards": Rule(
        "shares; scales stay whole", f"{_ZERO3}; bitsandbytes 0.50 nn/modules.py:Params4bit.quant_state"
    ),
    "secondary.trained_bytes": Rule(
        "second shards within a group", "deepspeed 0.19.8 runtime/zero/partition_parameters.py (ZeRO++ hpZ)"
    ),
    "secondary.frozen_bytes": Rule(
        "second shards of frozen weights",
        "deepspeed 0.19.8 runtime/zero/partition_parameters.py (ZeRO++ hpZ)",
    ),
    "nccl.network_bytes": Rule(
        "NCCL's buffers to other nodes, and its tables of all ranks",
        "NCCL 2.28 src/init.cc: DEFAULT_BUFFSIZE, src/channel.cc:initChannel",
    ),
    "states.unreleased_bytes": Rule("weights that autograd still holds", _MEASURED),
    "states.step_components": Rule("", _ZERO12),
    "states.components_in_optimizer": Rule("", _ZERO12),
    "blocks.final_norm_saved": Rule("final norm's output", _AUTOGRAD),
    "blocks._norm": Rule("norms", f"{_AUTOGRAD}; Liger's keep input and statistics"),
    "blocks._attention_saved": Rule("queries, keys, values, attention", _AUTOGRAD),
    "blocks._latent_attention_saved": Rule("latent attention", "DeepSeek-V2, arXiv 2405.04434; " + _AUTOGRAD),
    "blocks._query_key_norms": Rule("norms of queries and keys", _AUTOGRAD),
    "blocks._masked_attention": Rule(
        "attention with a mask", f"{_AUTOGRAD}; torch aten/src/ATen/native/transformers/attention.cpp"
    ),
    "blocks._unmasked_attention": Rule("queries, keys, values, attention", _AUTOGRAD),
    "blocks._traced_block": Rule("a block as it was traced", _AUTOGRAD),
    "mlp.mlp_saved": Rule("MLP", _AUTOGRAD),
    "mlp._routed_saved": Rule(
        "experts", f"{_AUTOGRAD}; Liger's experts: liger-kernel 0.8.5 ops/fused_moe.py"
    ),
    "mlp._router_saved": Rule("router", _AUTOGRAD),
    "mlp.experts_backward": Rule("gradients inside the experts", _AUTOGRAD),
    "mlp.mlp_backward": Rule(
        "gradients inside the MLP", "torch's autograd; liger-kernel 0.8.5 ops/swiglu.py"
    ),
    "blocks.block_bytes": Rule("a block's inputs, outputs, gradients", _AUTOGRAD),
    "qat.qat_bytes": Rule("copies that fake quantization keeps", _QAT),
    "qat.qat_scales": Rule("scales of fake quantization", _QAT),
    "qat._input_bytes": Rule("rounded inputs", _QAT),
    "blocks._softmax_backward": Rule("backward of softmax", _MEASURED),
    "blocks.eager_square": Rule("attention scores", _AUTOGRAD),
    "blocks._dropout_masks": Rule("dropout masks", _AUTOGRAD),
    "loss.loss_bytes": Rule(
        "",
        "transformers 5.x loss/loss_utils.py:ForCausalLMLoss;"
        " liger-kernel 0.8.5 ops/cross_entropy.py, ops/fused_linear_cross_entropy.py",
    ),
    "loss.liger_chunk_tokens": Rule(
        "", "liger-kernel 0.8.5 ops/fused_linear_cross_entropy.py:fused_linear_cross_entropy_forward"
    ),
    "walk._before_blocks": Rule(
        "rotary tables, token ids, labels, the embedding's", "transformers 5.x modelling code"
    ),
    "walk._packed_inputs": Rule(
        "inputs of 8-bit matrices", "bitsandbytes 0.50 autograd/_functions.py:MatMul8bitLt"
    ),
    "waiting.kept_bytes": Rule("checkpoints: the blocks' inputs", "torch utils/checkpoint.py"),
    "walk._accumulated": Rule("gradients of earlier micro-batches", _ZERO12),
    "walk.bucket_bytes": Rule("reduce bucket", f"{_ZERO12}: reduce_bucket_size, overlap_comm"),
    "waiting.bucket_at": Rule("reduce bucket, as far as it is touched", _ZERO12),
    "backward._block_alive": Rule("one block's backward", _WALK),
    "waiting.recomputed_bytes": Rule("one block's backward", _WALK),
    "sharded._at_fill": Rule("while the bucket is copied together", _FLAT_COPY),
    "sharded._head_to_host": Rule("the head's gradient on its way to the host", _FLAT_COPY),
    "reduction._last_reduced": Rule("the bucket's last flat copy", _FLAT_COPY),
    "reduction.to_host_bytes": Rule("a gradient on its way to the host", _FLAT_COPY),
    "flush._head_reduced": Rule("the head's gradient, reduced as it is", _ZERO12),
    "flush._at_block": Rule("the bucket is emptied", _ZERO12),
    "backward._first_product": Rule("gradient of the MLP's product", _WALK),
    "walk.tied_head_gradient": Rule("gradient of the tied head", _WALK),
    "backward._gradients_after": Rule("gradients so far", _WALK),
    "mask.mask_bytes": Rule("mask of eager attention", "transformers 5.x masking_utils.py"),
    "reduction._whole_gradients": Rule("gradients, all of them", _ZERO12),
    "reduction._at_embedding": Rule("gradient of the embedding", _AUTOGRAD),
    "reduction._at_reduction": Rule(
        "norms and copies on the way", f"{_ZERO12}; runtime/engine.py:allreduce_bucket"
    ),
    "reduction._reduced_gradients": Rule("gradients when the bucket is reduced", _ZERO12),
    "sizes.stored_bytes": Rule(
        "frozen weights", "QLoRA, arXiv 2305.14314; bitsandbytes 0.50 functional.py:quantize_4bit"
    ),
    "bound.upper_bytes": Rule("", "the peak, with the margin of H200 runs"),
    "cpu._moments": Rule("interpreter, torch, libraries", "measured with torch 2.13, deepspeed 0.19.8"),
    "cpu._in_process": Rule("", f"{_ZERO12}, stage3.py; with offload in the same process"),
    "cpu._in_step": Rule("", f"{_SWAP}; torch optim/adam.py:_single_tensor_adam"),
    "cpu._touched_bucket": Rule("reduce bucket, as far as it is touched", _ZERO3),
    "swapped.optimizer_buffer_bytes": Rule("buffers of swapped states", _SWAP),
    "swapped.param_buffer_bytes": Rule("buffers of swapped weights", _SWAP),
    "host._offloaded": Rule("", f"{_ZERO12}, stage3.py; blocks of powers of two: pytorch#95823"),
}

MODULES: dict[str, Rule] = {
    "states": Rule("", "deepspeed 0.19.8 runtime/zero/"),
    "blocks": Rule("", _AUTOGRAD),
    "mlp": Rule("", _AUTOGRAD),
    "loss": Rule("", "transformers 5.x loss/loss_utils.py:ForCausalLMLoss"),
    "backward": Rule("", _WALK),
    "walk": Rule("", _WALK),
    "waiting": Rule("", _WALK),
    "flush": Rule("", _ZERO12),
    "sharded": Rule("", _FLAT_COPY),
    "reduction": Rule("", _ZERO12),
    "mask": Rule("", "transformers 5.x masking_utils.py"),
    "predict": Rule("", "sum of the moments; margins measured on H200"),
    "cpu": Rule("", "measured resident sets of CPU ranks (torch 2.13, deepspeed 0.19.8)"),
    "host": Rule("", "deepspeed 0.19.8 runtime/zero/; process size measured on H200"),
    "swapped": Rule("", _SWAP),
    "sizes": Rule("", "the model's shape and deepspeed 0.19.8's partitioning"),
}
"""For functions without a row of their own."""

STATES: dict[str, str] = {
    "parameters": "weights",
    "gathered": "weights gathered by ZeRO-3",
    "secondary": "second shards of trained weights",
    "master": "fp32 master weights",
    "optimizer": "optimizer state",
    "gradients_resident": "permanent gradient buffer",
    "bucket_resident": "permanent reduce bucket or staging",
    "workspace": "cuBLAS workspaces",
    "scales": "scales of fake quantization",
    "outside_allocator": "paged optimizer state",
    "step_fp32_gradients": "fp32 gradients that the optimizer reads",
    "step_gradients": "gradients of the backward pass",
    "step_extra": "copies that the step makes",
    "init_peak": "copies while the engine is made",
}
"""Field of `StateBytes` to what it is."""

OPTIONS: dict[str, str] = {
    "micro_batch": "sequences",
    "seq_len": "tokens",
    "gpus": "GPUs",
    "nodes": "nodes",
    "lora_rank": "LoRA rank",
}
"""Options that formulas multiply with, and what they count."""

MODEL: dict[str, str] = {
    "hidden_size": "hidden",
    "intermediate_size": "MLP width",
    "num_heads": "heads",
    "num_kv_heads": "key heads",
    "head_dim": "head width",
    "vocab_size": "vocabulary",
    "num_experts": "experts",
    "experts_per_token": "experts a token",
    "expert_intermediate_size": "expert width",
    "shared_intermediate_size": "shared expert's width",
    "kv_lora_rank": "latent width",
    "q_lora_rank": "latent query width",
}
"""The same of a model's shape; other fields go by their own names."""

SIZES: dict[str, str] = {
    "trainable": "trained weights",
    "frozen": "frozen weights",
    "frozen_bytes": "B of frozen weights",
    "packed_bytes": "B of packed weights",
    "scale_bytes": "B of scales and tables of packed weights",
    "lora_rank": "LoRA rank",
    "lora_modules": "adapted matrices",
    "shard": "weights of a share",
    "held_gradients": "weights of whole tensors",
    "first_bucket": "weights in the first bucket",
    "layer_params": "weights of a block",
    "largest_tensor": "weights of the largest tensor",
    "head_params": "weights of the head",
    "wide_linear": "weights of an MLP matrix",
    "expert_tensor": "weights of the experts' largest tensor",
    "experts": "weights of a block's experts",
    "dtype_bytes": "B",
    "ranks": "ranks",
    "tokens": "tokens",
    "micro_batch": "sequences",
    "seq_len": "tokens",
}
"""The same of `Sizes`."""


def rule_of(function: str) -> Rule:
    """The row of a function (module.function), or of its module."""
    module = function.partition(".")[0]
    return RULES.get(function) or MODULES.get(module) or Rule("", f"profiler/memory/{module}.py")


def in_use(source: str, options: RunOptions, otherwise: str) -> str:
    """The places of a source that the options make use of; `otherwise` where none is."""
    unused = {
        "liger": not options.liger,
        "in 8 bits": "8bit" not in options.optimizer,
        "params4bit": options.quantization != "nf4",
        "quantize_4bit": options.quantization != "nf4",
        "qlora": options.quantization != "nf4",
        "matmul8bitlt": options.quantization != "int8",
    }
    left_out = [word for word, is_unused in unused.items() if is_unused]
    places = [part for part in source.split("; ") if not any(word in part.lower() for word in left_out)]
    return "; ".join(places) or otherwise

"""Modes of DeepSpeed's engine, chosen by raw key, that the training loop does not serve."""

from __future__ import annotations

from llmtop.presets.rule import Rule
from llmtop.presets.rules_deepspeed import raw
from llmtop.presets.spec import RunSpec
from llmtop.presets.truth import asks, is_false, is_off, is_true

_PACKING = ("quantized_initialization", "post_init_quant")
"""Keys of `weight_quantization` that say what is packed; nothing acts on the others without."""

MAX_SCALE_POWER = 32
"""DeepSpeed's default is 16; each power above what the gradients bear is a step that is skipped."""


def _scale_power(spec: RunSpec) -> float:
    given = raw(spec, "fp16.initial_scale_power")
    return float(given) if isinstance(given, (int, float)) else 0.0


def _packs_weights(spec: RunSpec) -> bool:
    block = raw(spec, "weight_quantization")
    return isinstance(block, dict) and any(asks(block.get(key)) for key in _PACKING)


def _super_offload(spec: RunSpec) -> bool:
    """Whether it is on, at the one stage that has it."""
    given = raw(spec, "zero_optimization.offload_optimizer.super_offload")
    return spec.options.zero == 3 and is_true(given)


def _split_settings(spec: RunSpec) -> list[str]:
    """The keys that say how, beside the one that says over how many; some take nothing that JSON can hold."""
    block = raw(spec, "tensor_parallel")
    given = block.items() if isinstance(block, dict) else ()
    return sorted(key for key, value in given if key != "autotp_size" and asks(value))


ENGINE_RULES: tuple[Rule, ...] = (
    Rule(
        name="gradient accumulation of the caller",
        refuses=lambda spec: is_false(raw(spec, "managed_gradient_accumulation")),
        what="deepspeed.managed_gradient_accumulation is false",
        why="the training loop says which micro-batch is the last of a step, and DeepSpeed then refuses that",
        fix="leave it out: --grad-accum {o.grad_accum} decides",
        source="deepspeed 0.19.8 runtime/engine.py:set_gradient_accumulation_boundary: an assertion",
    ),
    Rule(
        name="gradients in whole numbers",
        refuses=lambda spec: str(raw(spec, "data_types.grad_accum_dtype")).endswith("int8"),
        what="deepspeed.data_types.grad_accum_dtype = int8",
        why="gradients below 1 become 0: at stage 1 the step fails, at stage 3 the weights come out wrong",
        fix="leave it out, or --set deepspeed.data_types.grad_accum_dtype=fp32",
        source="seen with deepspeed 0.19.8: result type Float can't be cast to the desired output type Char",
    ),
    Rule(
        name="checkpoint writer",
        refuses=lambda spec: raw(spec, "checkpoint.writer") not in (None, "auto"),
        what="deepspeed.checkpoint.writer sets another way of writing checkpoints",
        why="it asks for CROSS_SIZE, which only DeepSpeed's own launcher sets: building the engine fails",
        fix="leave it out",
        source="deepspeed 0.19.8 runtime/model_checkpointing/utils.py: seen as a KeyError",
    ),
    Rule(
        name="loss scale that overflows",
        refuses=lambda spec: spec.options.precision == "fp16" and _scale_power(spec) > MAX_SCALE_POWER,
        what="deepspeed.fp16.initial_scale_power = {power}",
        why="the loss is scaled by 2 to this power, fp16 ends at 2 to the 16th, and each step that overflows"
        " is skipped and halves the scale",
        fix="leave it out for 16, or a value up to {most}",
        source="deepspeed 0.19.8 runtime/fp16/loss_scaler.py:DynamicLossScaler.update_scale",
        words=lambda spec: {"power": f"{_scale_power(spec):g}", "most": str(MAX_SCALE_POWER)},
    ),
    Rule(
        name="autocast to no type",
        refuses=lambda spec: (
            spec.options.zero == 3
            and spec.world_size > 1
            and spec.options.precision != "fp32"
            and is_true(raw(spec, "torch_autocast.enabled"))
            and raw(spec, "torch_autocast.dtype") in (None, "auto")
        ),
        what="deepspeed.torch_autocast without dtype with precision = {o.precision}",
        why="stage 3 then gathers weights of another type than they are kept in, and the first step fails",
        fix="--set deepspeed.torch_autocast.dtype={o.precision}, or leave the block out",
        source="deepspeed 0.19.8 runtime/torch_autocast.py; seen with gloo: invalid tensor type",
    ),
    Rule(
        name="autotuning",
        refuses=lambda spec: is_true(raw(spec, "autotuning.enabled")),
        what="deepspeed.autotuning.enabled is true",
        why="after a few steps DeepSpeed writes their speed to a file and ends the process",
        fix="leave the block out; llmtop compare shows two runs side by side",
        source="deepspeed 0.19.8 runtime/engine.py:_autotuning_exit",
    ),
    Rule(
        name="hybrid engine",
        refuses=lambda spec: is_true(raw(spec, "hybrid_engine.enabled")),
        what="deepspeed.hybrid_engine.enabled is true",
        why="it puts kernels that generate text into the model, and nothing is generated here",
        fix="leave the block out",
        source="deepspeed 0.19.8 runtime/hybrid_engine.py; on a CPU: this op had not been implemented",
    ),
    Rule(
        name="how to split a model that is not split",
        refuses=lambda spec: bool(_split_settings(spec)),
        what="deepspeed.tensor_parallel.{key}",
        why="it says how layers are split over ranks, and the training loop shards by ZeRO only",
        fix="leave the block out and shard by --zero 3",
        source="deepspeed 0.19.8 runtime/tensor_parallel/config.py:TPTrainingConfig; the training loop",
        words=lambda spec: {"key": _split_settings(spec)[0]},
    ),
    Rule(
        name="weights packed by DeepSpeed",
        refuses=_packs_weights,
        what="deepspeed.weight_quantization",
        why="it packs weights for inference, and packed weights take no gradient",
        fix="leave the block out; --quantization nf4 with --lora-rank 16 packs what is not trained",
        source="deepspeed 0.19.8 runtime/zero/partition_parameters.py; inference/quantization/utils.py",
    ),
    Rule(
        name="ZenFlow",
        refuses=lambda spec: not is_off(raw(spec, "zero_optimization.zenflow")),
        what="deepspeed.zero_optimization.zenflow",
        why="it says itself which micro-batches end in a step and divides the loss by its update_interval,"
        " by 0 where that is auto; here the training loop says which",
        fix="leave zenflow out; --offload-optimizer cpu works without",
        source="deepspeed 0.19.8 runtime/zenflow/engine.py:configure_zenflow; engine.py:_scale_loss_by_gas",
    ),
    Rule(
        name="SuperOffload on a CPU",
        refuses=lambda spec: spec.on_cpu and _super_offload(spec),
        what="deepspeed.zero_optimization.offload_optimizer.super_offload on the CPU",
        why="DeepSpeed has it for NVIDIA GPUs alone",
        fix="leave it out, or --gpu NAME to plan for a GPU",
        source="deepspeed 0.19.8: an assertion, seen on a CPU",
    ),
    Rule(
        name="SuperOffload of nothing",
        refuses=lambda spec: _super_offload(spec) and spec.options.offload_optimizer != "cpu",
        what="deepspeed.zero_optimization.offload_optimizer.super_offload"
        " with offload_optimizer = {o.offload_optimizer}",
        why="it steps the state that is in host memory, with parameters of the optimizer that is used there",
        fix="--offload-optimizer cpu, or leave it out",
        source="deepspeed 0.19.8 runtime/superoffload/superoffload_stage3.py: pg['amsgrad']",
    ),
    Rule(
        name="GPUDirect Storage on a CPU",
        refuses=lambda spec: spec.on_cpu and is_true(raw(spec, "aio.use_gds")),
        what="deepspeed.aio.use_gds on the CPU",
        why="it moves data between an NVMe drive and the memory of an NVIDIA GPU",
        fix="leave it out, or --gpu NAME to plan for a GPU",
        source="deepspeed 0.19.8 runtime/swap_tensor/aio_config.py: an assertion, seen on a CPU",
    ),
    Rule(
        name="DataStates checkpoints",
        refuses=lambda spec: spec.options.deepspeed.get("datastates_ckpt", False) is not False,
        what="deepspeed.datastates_ckpt sets another way of writing checkpoints",
        why="checkpoints are written by this program, and building the engine fails without that package",
        fix="leave it out",
        source="deepspeed 0.19.8 runtime/checkpoint_engine/datastates_checkpoint_engine.py, as seen",
    ),
)

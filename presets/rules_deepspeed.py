"""Raw DeepSpeed keys that cannot work, or that say something else than an option does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from llmtop.presets.errors import written
from llmtop.presets.rule import Refusal, Rule
from llmtop.presets.spec import DTYPE_SPELLINGS, RunSpec
from llmtop.presets.truth import is_false, is_true, truth

REMOVED_BLOCKS = frozenset(
    {
        "amp",
        "compression_training",
        "curriculum_learning",
        "eigenvalue",
        "elasticity",
        "graph_harvesting",
        "nebula",
        "progressive_layer_drop",
        "quantize_training",
        "sparse_attention",
        "sparse_gradients",
    }
)
REMOVED_ZERO_KEYS = frozenset({"mics_hierarchical_params_gather", "mics_shard_size", "zeropp_loco_param"})
"""Both refused by deepspeed 0.19.8, runtime/config.py:_reject_removed_config_keys."""

QUANTIZED_KEYS = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
"""ZeRO++ (arXiv 2306.10209): fewer bits on the wire."""
_SPLITS = (
    "tensor_parallel.autotp_size",
    "sequence_parallel_size",
    "expert_parallel.autoep_size",
    "pipeline.stages",
)
"""Ways of splitting a model over ranks that the training loop does not have."""
_ADAMS = ("adam", "adamw")
_QUANTIZED_TOGETHER = 8
"""Numbers that ZeRO++'s quantizer reads at once."""


class Owned(Struct, frozen=True, kw_only=True):
    """A raw key that says what an option says; the option decides, since the prediction is made from it."""

    path: str
    option: str
    value: Callable[[RunSpec], object]
    settings: str = ""
    """The options to set, where `option` is what comes of them."""

    @property
    def to_set(self) -> str:
        return self.settings or f"--{self.option.replace('_', '-')}"


OWNED: tuple[Owned, ...] = (
    Owned(path="zero_optimization.stage", option="zero", value=lambda spec: spec.options.zero),
    Owned(
        path="zero_optimization.offload_optimizer.device",
        option="offload_optimizer",
        value=lambda spec: spec.options.offload_optimizer,
    ),
    Owned(
        path="zero_optimization.offload_param.device",
        option="offload_param",
        value=lambda spec: spec.options.offload_param,
    ),
    Owned(path="bf16.enabled", option="precision", value=lambda spec: spec.options.precision == "bf16"),
    Owned(path="bfloat16.enabled", option="precision", value=lambda spec: spec.options.precision == "bf16"),
    Owned(path="fp16.enabled", option="precision", value=lambda spec: spec.options.precision == "fp16"),
    Owned(
        path="train_micro_batch_size_per_gpu",
        option="micro_batch",
        value=lambda spec: spec.options.micro_batch,
    ),
    Owned(
        path="gradient_accumulation_steps", option="grad_accum", value=lambda spec: spec.options.grad_accum
    ),
    Owned(
        path="train_batch_size",
        option="micro_batch x grad_accum x ranks",
        value=lambda spec: spec.global_batch,
        settings="--micro-batch, --grad-accum and --gpus",
    ),
    Owned(path="gradient_clipping", option="max_grad_norm", value=lambda spec: spec.options.max_grad_norm),
    Owned(path="optimizer.params.lr", option="learning_rate", value=lambda spec: spec.options.learning_rate),
    Owned(
        path="optimizer.params.weight_decay",
        option="weight_decay",
        value=lambda spec: spec.options.weight_decay,
    ),
    Owned(path="optimizer.params.eps", option="adam_epsilon", value=lambda spec: spec.options.adam_epsilon),
    Owned(
        path="optimizer.params.betas",
        option="adam_beta1 and adam_beta2",
        settings="--adam-beta1 and --adam-beta2",
        value=lambda spec: [spec.options.adam_beta1, spec.options.adam_beta2],
    ),
)


def raw(spec: RunSpec, path: str) -> Any:
    """The raw key at a dotted path, or None."""
    value: Any = spec.options.deepspeed
    for key in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def contradictions(spec: RunSpec) -> Iterator[Refusal]:
    """Raw keys that say something else than the option that decides."""
    for owned in OWNED:
        given, wanted = raw(spec, owned.path), owned.value(spec)
        said = truth(given) if isinstance(wanted, bool) else given
        if given is None or given == "auto" or said == wanted:
            continue
        shown = getattr(spec.options, owned.option, wanted)
        yield Refusal(
            rule=f"contradiction of {owned.option}",
            what=f"deepspeed.{owned.path} = {written(given)}, but {owned.option} = {written(shown)}",
            why="the prediction and the training loop follow the option",
            fix=f"say it once: set {owned.to_set} and leave deepspeed.{owned.path} out",
        )


def _removed_block(spec: RunSpec) -> str | None:
    return next((key for key in spec.options.deepspeed if key in REMOVED_BLOCKS), None)


def _removed_zero_key(spec: RunSpec) -> str | None:
    block = raw(spec, "zero_optimization")
    return next((key for key in block if key in REMOVED_ZERO_KEYS), None) if isinstance(block, dict) else None


def _number(spec: RunSpec, path: str) -> float | None:
    value = raw(spec, path)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _secondary_ranks(spec: RunSpec) -> int:
    given = _number(spec, "zero_optimization.zero_hpz_partition_size")
    return 1 if given is None else int(given)


def _ratio(spec: RunSpec) -> float:
    """The part of the optimizer that is offloaded."""
    given = _number(spec, "zero_optimization.offload_optimizer.ratio")
    return 1.0 if given is None else given


def _quantized(spec: RunSpec) -> bool:
    """Whether ZeRO++ is to send weights or gradients in fewer bits."""
    return any(_on(spec, f"zero_optimization.{key}") for key in QUANTIZED_KEYS)


def _on(spec: RunSpec, path: str) -> bool:
    return is_true(raw(spec, path))


def _odd_bucket(spec: RunSpec) -> bool:
    given = _number(spec, "zero_optimization.allgather_bucket_size")
    return spec.options.zero in (1, 2) and given is not None and (given % 2 != 0 or given == 0)


def _ragged_shards(spec: RunSpec) -> bool:
    """Whether the shard of a norm or bias is no multiple of what the quantizer takes, as matrices' are."""
    model = spec.model
    sizes = [model.hidden_size]
    if model.qk_norm == "head":
        sizes.append(model.head_dim)
    if model.qkv_bias:
        sizes.append(model.num_kv_heads * model.head_dim)
    return spec.world_size > 1 and any(
        -(-size // spec.world_size) % _QUANTIZED_TOGETHER != 0 for size in sizes
    )


def _split(spec: RunSpec) -> bool:
    return any(_count(spec, path) > 1 for path in _SPLITS)


def _count(spec: RunSpec, path: str) -> float:
    """A number of ranks, which DeepSpeed also takes as a text; 0 when there is none."""
    try:
        return float(raw(spec, path) or 0)
    except (TypeError, ValueError):
        return 0


def _accumulates_elsewhere(spec: RunSpec) -> bool:
    """Whether gradients add up in another precision than the weights have."""
    given = raw(spec, "data_types.grad_accum_dtype")
    return given not in (None, "auto", *DTYPE_SPELLINGS[spec.options.precision])


DEEPSPEED_RULES: tuple[Rule, ...] = (
    Rule(
        name="removed DeepSpeed block",
        refuses=lambda spec: _removed_block(spec) is not None,
        what="deepspeed holds a block that DeepSpeed no longer has",
        why="0.19 refuses amp, compression_training, elasticity, curriculum_learning and others by name",
        fix="delete the block; --precision, --micro-batch and --quantization replace what still makes sense",
        source="deepspeed 0.19.8 runtime/config.py:_reject_removed_config_keys",
    ),
    Rule(
        name="removed DeepSpeed ZeRO key",
        refuses=lambda spec: _removed_zero_key(spec) is not None,
        what="deepspeed.zero_optimization holds a key that DeepSpeed no longer has",
        why="MiCS and LoCo are gone: mics_shard_size, mics_hierarchical_params_gather, zeropp_loco_param",
        fix="delete the key; zero_hpz_partition_size keeps a second shard near each GPU",
        source="deepspeed 0.19.8 runtime/config.py:_reject_removed_config_keys",
    ),
    Rule(
        name="model split by raw key",
        refuses=_split,
        what="deepspeed splits the model by " + ", ".join(_SPLITS[:-1]) + f" or {_SPLITS[-1]}",
        why="the training loop shards by ZeRO only: every rank reads its own data and runs every layer",
        fix="leave the key out and shard by --zero 3",
        source="the training loop of this program",
    ),
    Rule(
        name="both precisions",
        refuses=lambda spec: _on(spec, "fp16.enabled") and _on(spec, "bf16.enabled"),
        what="deepspeed.fp16.enabled and deepspeed.bf16.enabled are both true",
        why="DeepSpeed asserts that at most one of them is on",
        fix="leave both out: --precision {o.precision} decides",
        source="deepspeed 0.19.8 runtime/config.py:_do_sanity_check",
    ),
    Rule(
        name="another optimizer by raw key",
        refuses=lambda spec: (
            raw(spec, "optimizer.type") is not None and str(raw(spec, "optimizer.type")).lower() not in _ADAMS
        ),
        what="deepspeed.optimizer.type is not an Adam",
        why="the training loop and the prediction know AdamW and its 8-bit and paged forms only",
        fix="leave it out and choose by --optimizer adamw, adamw_torch, adamw_8bit, ...",
        source="the optimizers of this program",
    ),
    Rule(
        name="scheduler by raw key",
        refuses=lambda spec: raw(spec, "scheduler") is not None,
        what="deepspeed.scheduler sets a learning-rate schedule",
        why="the training loop runs the schedule itself, and two of them fight",
        fix="leave it out: --lr-schedule {o.lr_schedule} and --warmup-steps {o.warmup_steps} decide",
        source="the training loop of this program",
    ),
    Rule(
        name="secondary shards need stage 3 and whole groups",
        refuses=lambda spec: (
            _secondary_ranks(spec) > 1
            and (
                spec.options.zero != 3 or spec.world_size % min(_secondary_ranks(spec), spec.world_size) != 0
            )
        ),
        what="deepspeed.zero_optimization.zero_hpz_partition_size, zero {o.zero}, world {spec.world_size}",
        why="ranks keep the second shard in groups of this size, at stage 3 only",
        fix="--zero 3 and a size that divides {spec.world_size}, or leave it out",
        source="deepspeed 0.19.8 utils/groups.py:_create_zero_param_parallel_group",
    ),
    Rule(
        name="another accumulation precision at stage 0",
        refuses=lambda spec: spec.options.zero == 0 and _accumulates_elsewhere(spec),
        what="deepspeed.data_types.grad_accum_dtype differs from precision = {o.precision} at zero = 0",
        why="DeepSpeed has no optimizer for that mix without ZeRO",
        fix="--zero 1 or above, or leave grad_accum_dtype out",
        source="deepspeed 0.19.8 runtime/engine.py:_do_optimizer_sanity_check",
    ),
    Rule(
        name="partial offload needs stage 3",
        refuses=lambda spec: _ratio(spec) < 1 and spec.options.zero != 3,
        what="deepspeed.zero_optimization.offload_optimizer.ratio below 1 with zero = {o.zero}",
        why="only stage 3 offloads a part of the optimizer",
        fix="--zero 3, or leave ratio out",
        source="deepspeed 0.19.8 runtime/zero/config.py:offload_ratio_check",
    ),
    Rule(
        name="partial offload needs DeepSpeed's Adam",
        refuses=lambda spec: (
            _ratio(spec) < 1
            and spec.options.zero == 3
            and spec.options.offload_optimizer != "none"
            and (spec.options.optimizer == "adamw_torch" or spec.on_cpu)
        ),
        what="deepspeed.zero_optimization.offload_optimizer.ratio below 1 with torch's AdamW",
        why="the part on the host steps with DeepSpeed's CPU Adam, and only that one can be divided"
        " (on the CPU kind torch's is used)",
        fix="--optimizer adamw on a GPU, or leave ratio out",
        source="deepspeed 0.19.8 runtime/zero/stage3.py: Hybrid Optimizer Only Supports DeepSpeedCPUAdam",
    ),
    Rule(
        name="ZeRO++ quantization needs stage 3",
        refuses=lambda spec: _quantized(spec) and spec.options.zero != 3,
        what="deepspeed.zero_optimization.zero_quantized_... with zero = {o.zero}",
        why="only stage 3 gathers weights and scatters gradients through its quantized collectives",
        fix="--zero 3, or leave the keys out",
        source="deepspeed 0.19.8 runtime/engine.py:_configure_zero_optimizer",
    ),
    Rule(
        name="ZeRO++ quantization on a CPU",
        refuses=lambda spec: _quantized(spec) and spec.on_cpu,
        what="deepspeed.zero_optimization.zero_quantized_... on the CPU",
        why="its quantizer is a CUDA kernel, and DeepSpeed's CPU backend has none",
        fix="leave the keys out, or --gpu NAME to plan for a GPU",
        source="deepspeed 0.19.8 ops/op_builder/cpu: no QuantizerBuilder",
    ),
    Rule(
        name="ZeRO++ and packed weights",
        refuses=lambda spec: (
            _on(spec, "zero_optimization.zero_quantized_weights") and spec.options.quantization != "none"
        ),
        what="deepspeed.zero_optimization.zero_quantized_weights with quantization = {o.quantization}",
        why="it would round the packed bits of the weights as if they were numbers",
        fix="--quantization none, or leave the key out: packed weights are already small to send",
        source="deepspeed 0.19.8 runtime/zero/partition_parameters.py:CUDAQuantizer.quantize",
    ),
    Rule(
        name="ZeRO++ and ragged shards",
        refuses=lambda spec: (
            _on(spec, "zero_optimization.zero_quantized_weights")
            and spec.options.zero == 3
            and _ragged_shards(spec)
        ),
        what="deepspeed.zero_optimization.zero_quantized_weights, {model.name} over {spec.world_size} ranks",
        why="each shard must be a multiple of 8 numbers, and those of the norms or biases are not",
        fix="--gpus with a number that divides them so (2, 4 or 8 as a rule), or leave the key out",
        source="deepspeed 0.19.8 runtime/zero/partition_parameters.py:CUDAQuantizer.quantize: an assertion",
    ),
    Rule(
        name="weights frozen after sharding",
        refuses=lambda spec: _on(spec, "zero_optimization.zero_quantized_nontrainable_weights"),
        what="deepspeed.zero_optimization.zero_quantized_nontrainable_weights",
        why="it looks at what is frozen while weights are sharded; here adapters freeze them after that",
        fix="leave the key out; --quantization nf4 stores frozen weights in 4 bits",
        source="deepspeed 0.19.8 runtime/zero/stage3.py:quantize_nontrainable_params",
    ),
    Rule(
        name="quantized gradients need nodes alike",
        refuses=lambda spec: (
            _on(spec, "zero_optimization.zero_quantized_gradients") and spec.has_uneven_nodes
        ),
        what="deepspeed.zero_optimization.zero_quantized_gradients with total_gpus = {o.total_gpus}",
        why="each rank makes groups by the devices of its own node, which are not as many on all",
        fix="--gpus N for as many of each node, or leave the key out",
        source="deepspeed 0.19.8 utils/groups.py:_get_local_all_to_all_group",
    ),
    Rule(
        name="quantized gradients over nodes need fp16",
        refuses=lambda spec: (
            _on(spec, "zero_optimization.zero_quantized_gradients")
            and spec.options.nodes > 1
            and spec.options.precision != "fp16"
            and raw(spec, "communication_data_type") not in DTYPE_SPELLINGS["fp16"]
        ),
        what="deepspeed.zero_optimization.zero_quantized_gradients with precision = {o.precision}",
        why="its kernel reads gradients as fp16 whatever they are, so others come out as noise",
        fix="--precision fp16, or --set deepspeed.communication_data_type=fp16, or leave the key out",
        source="deepspeed 0.19.8 ops/csrc/quantization/pt_binding.cpp:ds_swizzle_quant",
    ),
    Rule(
        name="quantized gradients without reduce_scatter",
        refuses=lambda spec: (
            _on(spec, "zero_optimization.zero_quantized_gradients")
            and is_false(raw(spec, "zero_optimization.reduce_scatter"))
        ),
        what="deepspeed.zero_optimization.zero_quantized_gradients with reduce_scatter false",
        why="quantized gradients go by a reduce-scatter made of two all-to-alls",
        fix="leave reduce_scatter out, or zero_quantized_gradients",
        source="deepspeed 0.19.8 runtime/zero/stage3.py: an assertion",
    ),
    Rule(
        name="odd all-gather bucket",
        refuses=_odd_bucket,
        what="deepspeed.zero_optimization.allgather_bucket_size is odd or 0 with zero = {o.zero}",
        why="buckets start at multiples of 4 bytes, two 16-bit numbers, and DeepSpeed divides by the size",
        fix="an even number of elements above 0, or leave it out",
        source="deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: nccl_start_alignment_factor; utils.py",
    ),
)

"""Which keys a DeepSpeed configuration has: literal tables of deepspeed 0.19.8, compared with it by a test.

`BLOCKS` maps the dotted path of a block to its keys; the root is the empty path. A strict block is a
pydantic model that forbids unknown keys; elsewhere DeepSpeed reads what it knows and never looks at
the rest. Of an open block only switches are told: DeepSpeed takes them as Python does, where "no" is true.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

DEEPSPEED_SERIES = "0.19.8"

Kind = Literal["flag", "whole", "number", "text", "texts", "choice", "path", "block", "anything"]


class Key(Struct, frozen=True, kw_only=True):
    """What one key takes."""

    kind: Kind
    low: float | None = None
    """Smallest value."""
    above: float | None = None
    """The value must be larger than this."""
    high: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    nullable: bool = False
    replaced_by: str | None = None
    """Set on a deprecated key: giving it and its successor together is refused."""

    @property
    def expected(self) -> str:
        """What the key takes, in words."""
        words = {
            "flag": "true or false",
            "whole": "a whole number",
            "number": "a number",
            "text": "a text in quotes",
            "texts": "a list of " + (", ".join(self.choices) or "texts"),
            "choice": "one of " + ", ".join(self.choices),
            "path": "a path in quotes",
            "block": "an object in braces",
            "anything": "any value",
        }[self.kind]
        bounds = [
            f"{sign} {bound:g}"
            for sign, bound in (
                ("of at least", self.low),
                ("above", self.above),
                ("up to", self.high),
                ("below", self.below),
            )
            if bound is not None
        ]
        return " ".join([words, " and ".join(bounds)]).strip()


class Block(Struct, frozen=True, kw_only=True):
    keys: dict[str, Key]
    strict: bool = False
    is_open: bool = False
    """Holds further keys, which are kept as they are."""
    prefixed: frozenset[str] = frozenset()
    """Keys that may also be written with `stage3_` in front, their usual spelling."""


FLAG = Key(kind="flag")
OPEN_FLAG = Key(kind="flag", nullable=True)
TEXT = Key(kind="text")
OPTIONAL_TEXT = Key(kind="text", nullable=True)
BLOCK = Key(kind="block")
ANYTHING = Key(kind="anything")
WHOLE = Key(kind="whole")
COUNT = Key(kind="whole", low=0)
POSITIVE = Key(kind="whole", low=1)
SHARE = Key(kind="number", low=0, high=1)
NUMBER = Key(kind="number")
NOT_NEGATIVE = Key(kind="number", low=0)
DEVICE = Key(kind="choice", choices=("none", "cpu", "nvme"))
NVME_PATH = Key(kind="path", nullable=True)
DTYPE_NAMES = (
    *("fp32", "float32", "float", "torch.float32"),
    *("fp16", "float16", "half", "torch.float16"),
    *("bf16", "bfloat16", "torch.bfloat16"),
    *("int8", "torch.int8"),
)
DTYPE = Key(kind="choice", choices=DTYPE_NAMES)
OPTIONAL_DTYPE = Key(kind="choice", choices=DTYPE_NAMES, nullable=True)
COMMUNICATION_DTYPE = Key(kind="choice", choices=("fp32", "fp16", "bf16"), nullable=True)


def _same(key: Key, names: str) -> dict[str, Key]:
    return dict.fromkeys(names.split(), key)


_ZERO = Block(
    strict=True,
    keys={
        "stage": Key(kind="whole", low=0, high=3),
        "reduce_bucket_size": Key(kind="whole", above=0),
        "overlap_comm": Key(kind="flag", nullable=True),
        "offload_param": Key(kind="block", nullable=True),
        "offload_optimizer": Key(kind="block", nullable=True),
        "zenflow": Key(kind="block", nullable=True),
        "leaf_module": Key(kind="block", nullable=True),
        "cpu_offload": Key(kind="flag", nullable=True, replaced_by="offload_optimizer"),
        "cpu_offload_param": Key(kind="flag", nullable=True, replaced_by="offload_param"),
        "cpu_offload_use_pin_memory": Key(kind="flag", nullable=True),
        "stage3_gather_fp16_weights_on_model_save": Key(
            kind="flag", replaced_by="gather_16bit_weights_on_model_save"
        ),
        "module_granularity_threshold": WHOLE,
        **_same(
            COUNT,
            "allgather_bucket_size sub_group_size prefetch_bucket_size param_persistence_threshold"
            " model_persistence_threshold max_live_parameters max_reuse_distance zero_hpz_partition_size",
        ),
        **_same(
            FLAG,
            "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions"
            " compute_grad_norm load_from_fp32_weights elastic_checkpoint gather_16bit_weights_on_model_save"
            " use_all_reduce_for_fetch_params allgather_sequential ignore_unused_parameters legacy_stage1"
            " round_robin_gradients parameter_alignment zero_quantized_weights"
            " zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear"
            " pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks"
            " save_muon_momentum_buffer_in_memory",
        ),
    },
    prefixed=frozenset(
        {
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        }
    ),
)

_MONITOR_FILES: dict[str, Key] = {"enabled": FLAG, "output_path": TEXT, "job_name": TEXT}

BLOCKS: dict[str, Block] = {
    "": Block(
        keys={
            **_same(POSITIVE, "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"),
            **_same(
                FLAG,
                "managed_gradient_accumulation dump_state disable_python_gc disable_allgather"
                " prescale_gradients zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
                " wall_clock_breakdown memory_breakdown use_data_before_expert_parallelism"
                " dataloader_drop_last",
            ),
            **_same(
                BLOCK,
                "zero_optimization fp16 optimizer scheduler activation_checkpointing comms_logger tensorboard"
                " wandb csv_monitor comet torch_autocast flops_profiler autotuning hybrid_engine pipeline"
                " data_efficiency checkpoint data_types weight_quantization compile timers tensor_parallel",
            ),
            **_same(Key(kind="block", nullable=True), "bf16 bfloat16 aio expert_parallel"),
            **_same(COMMUNICATION_DTYPE, "communication_data_type seq_parallel_communication_data_type"),
            "gradient_allreduce_op": Key(kind="choice", choices=("mean", "sum")),
            "gradient_clipping": NUMBER,
            "gradient_predivide_factor": Key(kind="number", above=0),
            "steps_per_print": Key(kind="number", above=0, nullable=True),
            "vocabulary_size": Key(kind="whole", low=0, nullable=True),
            "sequence_parallel_size": POSITIVE,
            "allgather_size": POSITIVE,
            "log_level": Key(
                kind="choice", choices=("debug", "info", "warning", "error", "critical"), nullable=True
            ),
            "datastates_ckpt": ANYTHING,
        }
    ),
    "zero_optimization": _ZERO,
    "zero_optimization.offload_param": Block(
        strict=True,
        keys={
            "device": DEVICE,
            "nvme_path": NVME_PATH,
            "pin_memory": FLAG,
            **_same(COUNT, "buffer_count buffer_size max_in_cpu"),
        },
    ),
    "zero_optimization.offload_optimizer": Block(
        strict=True,
        keys={
            "device": DEVICE,
            "nvme_path": NVME_PATH,
            "buffer_count": COUNT,
            **_same(SHARE, "ratio cpuadam_cores_perc"),
            **_same(FLAG, "pin_memory pipeline_read pipeline_write fast_init super_offload"),
        },
    ),
    "zero_optimization.zenflow": Block(
        strict=True,
        keys={
            "topk_ratio": Key(kind="number", above=0, below=1),
            "select_strategy": Key(kind="choice", choices=("auto", "step", "epoch")),
            **_same(Key(kind="whole", low=1), "select_interval update_interval"),
            **_same(FLAG, "overlap_step offload"),
            **_same(SHARE, "auto_ratio pt_reserved_cores_perc"),
            "full_warm_up_rounds": WHOLE,
            "steps_per_epoch": Key(kind="whole", nullable=True),
        },
    ),
    "zero_optimization.leaf_module": Block(
        strict=True, keys=_same(Key(kind="texts"), "classes names name_suffixes")
    ),
    "fp16": Block(
        strict=True,
        keys={
            **_same(FLAG, "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads"),
            "loss_scale": NOT_NEGATIVE,
            **_same(WHOLE, "initial_scale_power loss_scale_window hysteresis min_loss_scale"),
        },
    ),
    "bf16": Block(
        strict=True,
        keys=_same(
            FLAG,
            "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads"
            " bf16_optimizer_states",
        ),
    ),
    "compile": Block(
        strict=True,
        keys={
            **_same(
                FLAG,
                "deepcompile autoep_non_moe free_activation offload_activation offload_activation_pin_memory"
                " offload_opt_states double_buffer symmetric_memory debug_log offload_parameters"
                " sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather"
                " keep_int_input_tensors keep_all_input_tensors",
            ),
            "free_activation_threshold": WHOLE,
            "passes": Key(kind="texts", nullable=True, choices=("z1", "z3", "autosp", "autotp")),
        },
    ),
    "comms_logger": Block(
        strict=True, keys={**_same(FLAG, "enabled prof_all verbose debug"), "prof_ops": Key(kind="texts")}
    ),
    "tensorboard": Block(strict=True, keys=_MONITOR_FILES),
    "csv_monitor": Block(strict=True, keys=_MONITOR_FILES),
    "wandb": Block(
        strict=True,
        keys={"enabled": FLAG, "project": TEXT, **_same(OPTIONAL_TEXT, "group team")},
    ),
    "comet": Block(
        strict=True,
        keys={
            "enabled": FLAG,
            "samples_log_interval": WHOLE,
            "online": Key(kind="flag", nullable=True),
            **_same(OPTIONAL_TEXT, "project workspace api_key experiment_name experiment_key mode"),
        },
    ),
    "timers": Block(keys={"throughput": BLOCK}),
    "timers.throughput": Block(strict=True, keys=_same(FLAG, "enabled synchronized")),
    "hybrid_engine": Block(
        strict=True,
        keys={
            **_same(FLAG, "enabled release_inference_cache pin_parameters enable_cuda_graph"),
            "max_out_tokens": Key(kind="whole", above=0),
            **_same(WHOLE, "inference_tp_size tp_gather_partition_size"),
        },
    ),
    "tensor_parallel": Block(
        strict=True,
        keys={"autotp_size": COUNT}
        | _same(
            ANYTHING,
            "dtype tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend"
            " tensor_parallel tp injection_policy_tuple partition_config preset_model keep_module_on_host"
            " replace_with_kernel_inject kernel_inject",
        ),
    ),
    "weight_quantization": Block(
        strict=True,
        keys={
            "enabled": FLAG,
            **_same(WHOLE, "num_bits q_groups"),
            "q_type": Key(kind="choice", choices=("asymmetric", "symmetric")),
            **_same(BLOCK, "quantized_initialization post_init_quant"),
        },
    ),
    "optimizer": Block(keys={"type": TEXT, "params": BLOCK, "legacy_fusion": FLAG}),
    "optimizer.params": Block(
        is_open=True,
        keys={
            # Null is false where it is read as Python does, and torch's own default of the last two.
            **_same(OPEN_FLAG, "torch_adam adam_w_mode bias_correction fp32_optimizer_states set_grad_none"),
            **_same(OPEN_FLAG, "amsgrad maximize capturable differentiable foreach fused"),
        },
    ),
    "autotuning": Block(is_open=True, keys={"enabled": FLAG}),
    "data_efficiency": Block(is_open=True, keys={"enabled": FLAG}),
    "scheduler": Block(keys={"type": TEXT, "params": BLOCK}),
    "activation_checkpointing": Block(
        keys={
            **_same(
                FLAG,
                "partition_activations contiguous_memory_optimization cpu_checkpointing profile"
                " synchronize_checkpoint_boundary",
            ),
            "number_checkpoints": Key(kind="whole", low=0, nullable=True),
        }
    ),
    "aio": Block(
        keys={
            **_same(POSITIVE, "block_size queue_depth intra_op_parallelism"),
            **_same(FLAG, "single_submit overlap_events use_gds"),
        }
    ),
    "flops_profiler": Block(
        keys={
            **_same(FLAG, "enabled detailed"),
            "recompute_fwd_factor": NOT_NEGATIVE,
            **_same(WHOLE, "profile_step module_depth top_modules"),
            "output_file": Key(kind="path", nullable=True),
        }
    ),
    "torch_autocast": Block(
        keys={"enabled": FLAG, "dtype": DTYPE, "lower_precision_safe_modules": Key(kind="texts")}
    ),
    "data_types": Block(
        keys={
            **_same(OPTIONAL_DTYPE, "grad_accum_dtype param_dtype buffer_dtype"),
            "keep_in_fp32_modules": Key(kind="texts"),
        }
    ),
    "checkpoint": Block(
        keys={
            "tag_validation": Key(kind="choice", choices=("Warn", "Ignore", "Fail")),
            **_same(FLAG, "load_universal use_node_local_storage checkpoint_serialization"),
            "parallel_write": BLOCK,
            "writer": Key(kind="block", nullable=True),
        }
    ),
    "checkpoint.parallel_write": Block(keys={"pipeline_stage": FLAG}),
}

MEANINGFUL_AUTO: frozenset[str] = frozenset(
    {
        "data_types.keep_in_fp32_modules",
        "zero_optimization.zenflow.select_strategy",
        "zero_optimization.zenflow.select_interval",
        "zero_optimization.zenflow.update_interval",
    }
)
"""Keys for which DeepSpeed itself gives the word "auto" a meaning."""

OPTIMIZER_NAMES = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "MuAdam", "MuAdamW", "MuSGD", "Muon")
"""Optimizers that DeepSpeed builds by name; it reads these names in any case."""

SCHEDULERS: dict[str, tuple[str, ...]] = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration"),
    "WarmupDecayLR": (
        *("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
        "last_batch_iteration",
    ),
    "WarmupCosineLR": (
        *("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"),
        "last_batch_iteration",
    ),
    "OneCycle": (
        *("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size"),
        *("cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum"),
        *("cycle_min_mom", "cycle_max_mom", "decay_mom_rate", "last_batch_iteration"),
    ),
    "LRRangeTest": (
        *("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate"),
        *("lr_range_test_staircase", "last_batch_iteration"),
    ),
}
"""DeepSpeed's schedules and their parameters."""

TORCH_SCHEDULERS = (
    *("LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR"),
    *("SequentialLR", "CosineAnnealingLR", "ChainedScheduler", "ReduceLROnPlateau", "CyclicLR"),
    *("CosineAnnealingWarmRestarts", "OneCycleLR", "PolynomialLR", "LRScheduler"),
)

REMOVED: dict[str, str] = {
    "nebula": "Delete the block; checkpoints are written by torch.save.",
    "compression_training": "Delete the block; prune or quantize the model with another library.",
    "amp": 'Use "bf16": {"enabled": true} (or fp16) in its place.',
    "quantize_training": "Delete the block.",
    "sparse_gradients": "Delete the key; embeddings built with sparse=True need none.",
    "eigenvalue": "Delete the block.",
    "sparse_attention": "Delete the block; choose a kernel with the attention option.",
    "elasticity": "Delete the block and give the batch sizes themselves.",
    "graph_harvesting": "Delete the key.",
    "curriculum_learning": "Move it to data_efficiency.data_sampling.curriculum_learning.",
    "progressive_layer_drop": "Delete the block.",
    "zero_optimization.mics_shard_size": "Delete it; zero_hpz_partition_size keeps a shard in each node.",
    "zero_optimization.mics_hierarchical_params_gather": "Delete it.",
    "zero_optimization.zeropp_loco_param": "Delete it; zero_quantized_gradients works without.",
}
"""Keys of older releases whose mere presence is refused today, and what to do about each."""

REMOVED_OPTIMIZERS = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")

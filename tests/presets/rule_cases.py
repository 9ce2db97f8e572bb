"""For each rule a combination that it refuses, and the changes that its fix names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmtop.presets import resolve, rules
from llmtop.presets.resolve import Layer, Machine
from llmtop.presets.spec import RunSpec, ValueSource

BOX = Machine(gpu="h100-80gb", gpus=8, host_memory_bytes=2**40)


def spec(**values: Any) -> RunSpec:
    layer = Layer(ValueSource.RECIPE, "test.toml", {"model": "llama-3.2-1b"} | values)
    return resolve.assemble([layer], name="test", machine=BOX)


def refused_by(**values: Any) -> list[str]:
    return [refusal.rule for refusal in rules.refusals(spec(**values))]


def flag(key: str, value: Any) -> str:
    """How somebody types the option."""
    return ("--no-" if value is False else "--") + key.replace("_", "-")


def zero_block(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # rule: (a combination that it refuses, the changes that its fix names)
    "offload_param needs stage 3": ({"offload_param": "cpu", "zero": 2}, {"zero": 3}),
    "samples faster than readings": ({"sample_seconds": 0.001}, {"sample_seconds": 0.01}),
    "samples too far apart": ({"sample_seconds": 3600.0}, {"sample_seconds": 600}),
    "hangs sooner than steps are told": ({"hang_floor_seconds": 0.5}, {"hang_floor_seconds": 5}),
    "threads without cores": ({"threads_per_rank": 100_000}, {"threads_per_rank": 0}),
    "offload_optimizer needs sharding": ({"offload_optimizer": "cpu", "zero": 0}, {"zero": 1}),
    "nvme needs stage 3": (
        {"offload_optimizer": "nvme", "nvme_path": "/nvme", "zero": 2},
        {"offload_optimizer": "cpu"},
    ),
    "nvme needs a path": ({"offload_param": "nvme", "zero": 3}, {"nvme_path": "/nvme"}),
    "bitsandbytes optimizers cannot be offloaded": (
        {"optimizer": "paged_adamw_8bit", "offload_optimizer": "cpu"},
        {"optimizer": "adamw"},
    ),
    "quantized weights need LoRA": ({"quantization": "nf4"}, {"lora_rank": 16}),
    "int8 is wrong at stage 3": (
        {"quantization": "int8", "lora_rank": 8, "zero": 3},
        {"quantization": "nf4"},
    ),
    "family that is not packed": (
        {"model": "FALCON", "quantization": "nf4", "lora_rank": 8},
        {"quantization": "none"},
    ),
    "QAT at stage 3": ({"qat": "int8-int4", "zero": 3}, {"zero": 2}),
    "QAT of frozen weights": ({"qat": "int8-int4", "lora_rank": 8}, {"lora_rank": 0}),
    "QAT and a mixture of experts": (
        {"model": "mixtral-8x7b", "qat": "int4-weight-only"},
        {"qat": "none"},
    ),
    "QAT and matrices of another class": ({"model": "FALCON", "qat": "int8-int4"}, {"qat": "none"}),
    "QAT group that divides no row": ({"qat": "int8-int4", "qat_group": 96}, {"qat_group": 64}),
    "QAT group without QAT": ({"qat_group": 64}, {"qat": "int4-weight-only"}),
    "fp16 on a CPU": ({"gpu": "cpu", "precision": "fp16"}, {"precision": "fp32"}),
    "bf16 needs compute capability 8.0": (
        {"gpu": "v100-32gb", "precision": "bf16"},
        {"precision": "fp16"},
    ),
    "flash attention on a CPU": (
        {"gpu": "cpu", "precision": "bf16", "attention": "flash_attention_2"},
        {"attention": "sdpa"},
    ),
    "flash attention in fp32": (
        {"attention": "flash_attention_2", "precision": "fp32"},
        {"precision": "bf16"},
    ),
    "flash attention 2 needs compute capability 8.0": (
        {"gpu": "t4", "attention": "flash_attention_2"},
        {"attention": "sdpa"},
    ),
    "flash attention 3 needs Hopper": (
        {"gpu": "b200", "attention": "flash_attention_3"},
        {"attention": "flash_attention_2"},
    ),
    "flash attention 4 needs Hopper or Blackwell": (
        {"gpu": "a100-80gb", "attention": "flash_attention_4"},
        {"attention": "flash_attention_2"},
    ),
    "flash attention and wide heads": (
        {"model": "WIDE", "attention": "flash_attention_2"},
        {"attention": "sdpa"},
    ),
    "family without flash attention": (
        {"model": "BLOOM", "attention": "flash_attention_2"},
        {"attention": "eager"},
    ),
    "family without SDPA": ({"model": "gemma-2-2b", "attention": "sdpa"}, {"attention": "eager"}),
    "liger on a CPU": ({"gpu": "cpu", "liger": True}, {"liger": False}),
    "family without liger": ({"model": "gpt2", "liger": True}, {"liger": False}),
    "family with another flash attention": (
        {"model": "GPT_OSS", "gpu": "h200", "attention": "flash_attention_2"},
        {"attention": "eager"},
    ),
    "liger_kernels without liger": ({"liger_kernels": "rope"}, {"liger": True}),
    "kernel that the family does not have": (
        {"model": "MISTRAL", "liger": True, "liger_kernels": "rms_norm,cross_entropy"},
        {"liger_kernels": "rms_norm,fused_linear_cross_entropy"},
    ),
    "two cross-entropies": (
        {"liger": True, "liger_kernels": "cross_entropy,fused_linear_cross_entropy"},
        {"liger_kernels": "fused_linear_cross_entropy"},
    ),
    "liger's MLP is another one": (
        {"model": "GELU", "liger": True},
        {"liger_kernels": "rms_norm,rope,fused_linear_cross_entropy"},
    ),
    "checkpointing_every without checkpointing": (
        {"checkpointing_every": 2},
        {"gradient_checkpointing": True},
    ),
    "checkpointing_every beyond the layers": (
        {"gradient_checkpointing": True, "checkpointing_every": 17},
        {"checkpointing_every": 16},
    ),
    "longer than the position table": ({"model": "gpt2", "seq_len": 1025}, {"seq_len": 1024}),
    "experts of ragged rows": ({"model": "NARROW_EXPERTS"}, {"precision": "fp32"}),
    "more tokens than there can be": ({"micro_batch": 10**6}, {"micro_batch": 1}),
    "removed DeepSpeed block": ({"deepspeed": {"amp": {"enabled": True}}}, {"deepspeed": {}}),
    "removed DeepSpeed ZeRO key": ({"deepspeed": zero_block(mics_shard_size=2)}, {"deepspeed": {}}),
    "model split by raw key": (
        {"deepspeed": {"tensor_parallel": {"autotp_size": 2}}},
        {"deepspeed": {}, "zero": 3},
    ),
    "both precisions": (
        {"deepspeed": {"fp16": {"enabled": True}, "bf16": {"enabled": True}}},
        {"deepspeed": {}},
    ),
    "another optimizer by raw key": ({"deepspeed": {"optimizer": {"type": "Lion"}}}, {"deepspeed": {}}),
    "scheduler by raw key": ({"deepspeed": {"scheduler": {"type": "WarmupLR"}}}, {"deepspeed": {}}),
    "as many GPUs as the nodes have": (
        {"gpus": 4, "nodes": 2, "total_gpus": 9},
        {"total_gpus": 8},
    ),
    "quantized gradients need nodes alike": (
        {
            "deepspeed": zero_block(zero_quantized_gradients=True),
            **{"zero": 3, "precision": "fp16", "gpus": 4, "nodes": 2, "total_gpus": 6},
        },
        {"deepspeed": {}},
    ),
    "secondary shards need stage 3 and whole groups": (
        {"deepspeed": zero_block(zero_hpz_partition_size=3), "zero": 3},
        {"deepspeed": zero_block(zero_hpz_partition_size=4)},
    ),
    "another accumulation precision at stage 0": (
        {"deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}, "zero": 0},
        {"zero": 1},
    ),
    "partial offload needs stage 3": (
        {"deepspeed": zero_block(offload_optimizer={"ratio": 0.3}), "zero": 2, "offload_optimizer": "cpu"},
        {"zero": 3},
    ),
    "partial offload needs DeepSpeed's Adam": (
        {
            "deepspeed": zero_block(offload_optimizer={"ratio": 0.3}),
            "zero": 3,
            "offload_optimizer": "cpu",
            "optimizer": "adamw_torch",
        },
        {"optimizer": "adamw"},
    ),
    "ZeRO++ quantization needs stage 3": (
        {"deepspeed": zero_block(zero_quantized_gradients=True), "zero": 2},
        {"zero": 3},
    ),
    "ZeRO++ quantization on a CPU": (
        {"deepspeed": zero_block(zero_quantized_weights=True), "zero": 3, "gpu": "cpu"},
        {"gpu": "h200"},
    ),
    "ZeRO++ and packed weights": (
        {
            "deepspeed": zero_block(zero_quantized_weights=True),
            "zero": 3,
            "quantization": "nf4",
            "lora_rank": 8,
        },
        {"quantization": "none"},
    ),
    "gradient accumulation of the caller": (
        {"deepspeed": {"managed_gradient_accumulation": False}},
        {"deepspeed": {}},
    ),
    "gradients in whole numbers": (
        {"deepspeed": {"data_types": {"grad_accum_dtype": "int8"}}},
        {"deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}},
    ),
    "checkpoint writer": ({"deepspeed": {"checkpoint": {"writer": {"type": "fast"}}}}, {"deepspeed": {}}),
    "hybrid engine": ({"deepspeed": {"hybrid_engine": {"enabled": True}}}, {"deepspeed": {}}),
    "how to split a model that is not split": (
        {"deepspeed": {"tensor_parallel": {"autotp_size": 0, "dtype": "bf16"}}},
        {"deepspeed": {"tensor_parallel": {"autotp_size": 0}}, "zero": 3},
    ),
    "weights packed by DeepSpeed": (
        {"deepspeed": {"weight_quantization": {"quantized_initialization": {"num_bits": 4}}}},
        {"deepspeed": {}, "quantization": "nf4", "lora_rank": 16},
    ),
    "loss scale that overflows": (
        {"precision": "fp16", "deepspeed": {"fp16": {"initial_scale_power": 200}}},
        {"deepspeed": {"fp16": {"initial_scale_power": 32}}},
    ),
    "autocast to no type": (
        {"deepspeed": {"torch_autocast": {"enabled": True}}, "zero": 3, "gpus": 2},
        {"deepspeed": {"torch_autocast": {"enabled": True, "dtype": "bf16"}}},
    ),
    "autotuning": ({"deepspeed": {"autotuning": {"enabled": True}}}, {"deepspeed": {}}),
    "ZenFlow": (
        {"deepspeed": zero_block(zenflow={"topk_ratio": 0.1}), "offload_optimizer": "cpu"},
        {"deepspeed": {}},
    ),
    "SuperOffload on a CPU": (
        {
            "deepspeed": zero_block(offload_optimizer={"super_offload": True}),
            "zero": 3,
            "offload_optimizer": "cpu",
            "gpu": "cpu",
        },
        {"gpu": "h200"},
    ),
    "SuperOffload of nothing": (
        {"deepspeed": zero_block(offload_optimizer={"super_offload": True}), "zero": 3},
        {"offload_optimizer": "cpu"},
    ),
    "GPUDirect Storage on a CPU": (
        {"deepspeed": {"aio": {"use_gds": True}}, "gpu": "cpu"},
        {"gpu": "h200"},
    ),
    "DataStates checkpoints": ({"deepspeed": {"datastates_ckpt": None}}, {"deepspeed": {}}),
    "16-bit masters need DeepSpeed's Adam": (
        {
            "deepspeed": {"bf16": {"bf16_master_weights_and_grads": True}},
            "zero": 2,
            "offload_optimizer": "cpu",
            "optimizer": "adamw_torch",
        },
        {"optimizer": "adamw"},
    ),
    "optimizer that DeepSpeed has not tested": (
        {"deepspeed": {"zero_allow_untested_optimizer": False}, "optimizer": "adamw_8bit"},
        {"optimizer": "adamw"},
    ),
    "optimizer block beside another optimizer": (
        {"deepspeed": {"optimizer": {"type": "AdamW"}}, "optimizer": "adamw_8bit"},
        {"optimizer": "adamw"},
    ),
    "torch's AdamW by raw key": (
        {"deepspeed": {"optimizer": {"params": {"torch_adam": True}}}},
        {"optimizer": "adamw_torch"},
    ),
    "parameter that the optimizer does not take": (
        {"deepspeed": {"optimizer": {"params": {"amsgrad": True}}}},
        {"deepspeed": {}},
    ),
    "ZeRO++ and ragged shards": (
        {"deepspeed": zero_block(zero_quantized_weights=True), "zero": 3, "gpus": 3},
        {"gpus": 4},
    ),
    "weights frozen after sharding": (
        {"deepspeed": zero_block(zero_quantized_nontrainable_weights=True), "zero": 3, "lora_rank": 8},
        {"deepspeed": {}, "quantization": "nf4"},
    ),
    "quantized gradients over nodes need fp16": (
        {"deepspeed": zero_block(zero_quantized_gradients=True), "zero": 3, "nodes": 2},
        {"precision": "fp16"},
    ),
    "quantized gradients without reduce_scatter": (
        {"deepspeed": zero_block(zero_quantized_gradients=True, reduce_scatter=False), "zero": 3},
        {"deepspeed": zero_block(zero_quantized_gradients=True)},
    ),
    "odd all-gather bucket": (
        {"deepspeed": zero_block(allgather_bucket_size=5_000_001), "zero": 1},
        {"deepspeed": zero_block(allgather_bucket_size=5_000_000)},
    ),
}
CONFIGS = {
    "NARROW_EXPERTS": '{"model_type": "mixtral", "vocab_size": 99, "hidden_size": 64,'
    ' "intermediate_size": 36, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,'
    ' "num_local_experts": 4, "num_experts_per_tok": 2}',
    "FALCON": '{"model_type": "falcon", "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 1,'
    ' "num_attention_heads": 2}',
    "GPT_OSS": '{"model_type": "gpt_oss", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 64,'
    ' "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,'
    ' "num_local_experts": 4, "num_experts_per_tok": 2}',
    "MISTRAL": '{"model_type": "mistral", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 64,'
    ' "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}',
    "NO_EXPERTS": '{"model_type": "deepseek_v2", "vocab_size": 99, "hidden_size": 64,'
    ' "intermediate_size": 64, "moe_intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2,'
    ' "num_key_value_heads": 2, "first_k_dense_replace": DENSE, "n_routed_experts": 4,'
    ' "num_experts_per_tok": 2, "n_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": 16,'
    ' "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}',
    "GELU": '{"model_type": "llama", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 64,'
    ' "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_act": "gelu"}',
    "WIDE": '{"model_type": "gemma", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 64,'
    ' "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 512}',
    "BLOOM": '{"model_type": "bloom", "vocab_size": 99, "hidden_size": 64, "n_layer": 1, "n_head": 2}',
}


def with_model(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    name = values.get("model")
    if name not in CONFIGS:
        return values
    path = folder / "config.json"
    path.write_text(CONFIGS[name])
    return values | {"model": str(path)}

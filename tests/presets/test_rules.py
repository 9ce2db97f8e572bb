"""Each refusal fires on its combination, tells why and what works, and what it tells does work."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from llmtop.presets import resolve, rules, rules_deepspeed, rules_engine, rules_optimizer
from llmtop.presets.errors import UsageError
from llmtop.presets.resolve import Layer, Machine
from llmtop.presets.rule import Rule
from llmtop.presets.spec import RunSpec, ValueSource

BOX = Machine(gpu="h100-80gb", gpus=8, host_memory_bytes=2**40)
TABLES: tuple[Rule, ...] = (
    *rules.RULES,
    *rules_deepspeed.DEEPSPEED_RULES,
    *rules_optimizer.OPTIMIZER_RULES,
    *rules_engine.ENGINE_RULES,
)


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


@pytest.mark.parametrize("name", CASES)
def test_the_rule_refuses_and_its_fix_works(name: str, tmp_path: Path) -> None:
    bad, mend = CASES[name]
    bad = with_model(bad, tmp_path)
    assert name in refused_by(**bad)
    assert name not in refused_by(**(bad | mend))
    refusal = next(refusal for refusal in rules.refusals(spec(**bad)) if refusal.rule == name)
    assert refusal.what and refusal.why and refusal.fix
    assert "{" not in refusal.what + refusal.why + refusal.fix
    # The fix names the option, unless it tells to leave a raw key out.
    assert all(flag(key, value) in refusal.fix for key, value in mend.items() if key != "deepspeed")
    assert " = " not in refusal.fix, "a fix is written as somebody would type it"


@pytest.mark.parametrize("name", CASES)
def test_resolve_raises_the_first_refusal(name: str, tmp_path: Path) -> None:
    values = with_model(CASES[name][0], tmp_path)
    layer = Layer(ValueSource.RECIPE, "test.toml", {"model": "llama-3.2-1b"} | values)
    first = rules.refusals(spec(**values))[0]
    with pytest.raises(UsageError) as caught:
        resolve.resolve([layer], name="test", machine=BOX)
    assert (caught.value.what, caught.value.fix) == (first.what, first.fix)


def test_every_rule_has_a_case_a_source_and_a_name_of_its_own() -> None:
    names = [rule.name for rule in TABLES]
    assert len(set(names)) == len(names)
    assert set(names) == set(CASES)
    assert all(rule.source for rule in TABLES)


def test_what_works_is_not_refused() -> None:
    for values in (
        {},
        {"zero": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
        {"zero": 3, "offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": "/nvme"},
        {"zero": 3, "quantization": "nf4", "lora_rank": 8},
        {"zero": 2, "quantization": "int8", "lora_rank": 8, "optimizer": "paged_adamw_32bit"},
        {"gpu": "cpu", "quantization": "nf4", "lora_rank": 8, "optimizer": "adamw_8bit"},
        {"gpu": "cpu", "precision": "bf16", "zero": 3, "offload_optimizer": "cpu"},
        {"gpu": "t4"},
        {"qat": "int8-int4", "zero": 2, "offload_optimizer": "cpu", "liger": True},
        {"qat": "int4-weight-only", "qat_group": 128, "zero": 0, "gpu": "cpu"},
        {"attention": "flash_attention_3", "gpu": "h200"},
        {"attention": "flash_attention_4", "gpu": "b200"},
        {"model": "gemma-2-2b", "attention": "flash_attention_2"},
        {"gradient_checkpointing": True, "liger": True},
        {"liger": True, "liger_kernels": "rope,cross_entropy", "quantization": "nf4", "lora_rank": 8},
        {"gradient_checkpointing": True, "checkpointing_reentrant": True, "checkpointing_every": 3},
        {"zero": 3, "deepspeed": zero_block(zero_quantized_weights=True, zero_hpz_partition_size=8)},
        {"zero": 3, "deepspeed": zero_block(zero_quantized_gradients=True)},
        {"zero": 2, "deepspeed": zero_block(zero_quantized_weights=False, zero_hpz_partition_size=0)},
        {"zero": 1, "deepspeed": zero_block(overlap_comm=True, allgather_bucket_size=2e8)},
        {"precision": "fp16", "deepspeed": {"fp16": {"initial_scale_power": 12, "loss_scale": 0}}},
        {"seq_len": 200_000, "gradient_checkpointing": True},
        {"deepspeed": {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}}},
        {"deepspeed": zero_block(stage=2, reduce_bucket_size="auto")},
        {"deepspeed": {"train_batch_size": 8, "gradient_clipping": "auto"}},
    ):
        assert refused_by(**values) == []


def test_an_empty_all_gather_bucket_is_refused() -> None:
    assert refused_by(zero=2, deepspeed=zero_block(allgather_bucket_size=0)) == ["odd all-gather bucket"]
    assert refused_by(zero=3, deepspeed=zero_block(allgather_bucket_size=0)) == []


@pytest.mark.parametrize("ratio", [0, 0.0, 0.5])
def test_nothing_offloaded_is_less_than_all(ratio: float) -> None:
    block = zero_block(offload_optimizer={"ratio": ratio})
    assert refused_by(zero=2, offload_optimizer="cpu", deepspeed=block) == ["partial offload needs stage 3"]
    assert refused_by(zero=3, offload_optimizer="cpu", deepspeed=block) == []


@pytest.mark.parametrize(
    ("gpus", "nodes", "refused"), [(8, 1, False), (8, 2, False), (8, 4, True), (1, 1, False)]
)
def test_norms_of_heads_are_cut_in_shards_too(gpus: int, nodes: int, refused: bool) -> None:
    """Qwen3's are of 128 numbers: over 32 ranks 4 each."""
    found = refused_by(
        model="qwen3-8b", zero=3, gpus=gpus, nodes=nodes, deepspeed=zero_block(zero_quantized_weights=True)
    )
    assert found == (["ZeRO++ and ragged shards"] if refused else [])


def optimizer_block(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"params": params}}


def test_each_adam_takes_parameters_of_its_own() -> None:
    takes = {"bias_correction": ("adamw", "offloaded"), "amsgrad": ("adamw_torch", "offloaded", "cpu")}
    places: dict[str, dict[str, Any]] = {
        "adamw": {},
        "offloaded": {"offload_optimizer": "cpu"},
        "adamw_torch": {"optimizer": "adamw_torch"},
        "cpu": {"gpu": "cpu"},
    }
    for param, taken_by in takes.items():
        for place, values in places.items():
            found = refused_by(**values, deepspeed=optimizer_block(**{param: True}))
            expected = [] if place in taken_by else ["parameter that the optimizer does not take"]
            assert found == expected, (param, place)
    # DeepSpeed's own Adam may be asked for on the CPU, where the usual one is torch's.
    assert refused_by(gpu="cpu", deepspeed=optimizer_block(torch_adam=False, set_grad_none=True)) == []


def test_biases_are_not_in_ligers_mlp(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(CONFIGS["GELU"].replace('"hidden_act": "gelu"', '"mlp_bias": true'))
    assert refused_by(model=str(path), liger=True) == ["liger's MLP is another one"]
    assert refused_by(model=str(path), liger=True, liger_kernels="rms_norm,rope") == []


def test_a_missing_kernel_is_told_with_those_that_there_are() -> None:
    refusal = rules.refusals(spec(model="qwen2.5-7b", liger=True, liger_kernels="layer_norm"))[0]
    assert "no layer_norm" in refusal.what
    assert "rms_norm,rope,glu,cross_entropy,fused_linear_cross_entropy" in refusal.fix


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("all", "all"),
        ("ALL", "all"),
        ("rope, RMS-norm", "rms_norm,rope"),
        ("swiglu", "glu"),
        ("geglu,glu,rope", "rope,glu"),
    ],
)
def test_kernels_are_kept_in_one_spelling(typed: str, kept: str) -> None:
    assert spec(liger=True, liger_kernels=typed).options.liger_kernels == kept


def test_kernels_may_stand_in_a_list() -> None:
    """As TOML writes several words."""
    assert spec(liger=True, liger_kernels=["rope", "rms-norm"]).options.liger_kernels == "rms_norm,rope"
    with pytest.raises(UsageError, match="'ropes' is not valid"):
        spec(liger=True, liger_kernels=["rope", "ropes"])
    with pytest.raises(UsageError, match="liger_kernels"):
        spec(liger=True, liger_kernels=[3])


@pytest.mark.parametrize("typed", ["", "rms", "rope,,glu", "all,rope", "fused"])
def test_an_unknown_kernel_is_refused(typed: str) -> None:
    with pytest.raises(UsageError, match="liger_kernels"):
        spec(liger=True, liger_kernels=typed)


@pytest.mark.parametrize(
    "raw",
    [
        {"tensor_parallel": {"autotp_size": "4"}},
        {"sequence_parallel_size": 2},
        {"expert_parallel": {"autoep_size": 2}},
        {"pipeline": {"stages": 2}},
    ],
)
def test_no_raw_key_splits_the_model(raw: dict[str, Any]) -> None:
    assert refused_by(deepspeed=raw) == ["model split by raw key"]


@pytest.mark.parametrize(
    "raw",
    [
        {"tensor_parallel": {"autotp_size": 0}},
        {"sequence_parallel_size": 1},
        {"pipeline": {"stages": "auto"}},
        {"pipeline": True},
        {"tensor_parallel": {"autotp_size": 0, "tp_overlap_comm": False, "tp_grain_size": None}},
        {"tensor_parallel": {"tp_overlap_comm": "auto"}},
        {"weight_quantization": {"enabled": False, "num_bits": 8}},
        {"weight_quantization": {"num_bits": 8, "quantized_initialization": {}}},
    ],
)
def test_a_split_that_is_none_is_allowed(raw: dict[str, Any]) -> None:
    assert refused_by(deepspeed=raw) == []


def test_an_unknown_device_is_taken_at_its_users_word() -> None:
    odd = Machine(gpu="mystery-gpu", gpus=1, host_memory_bytes=None)
    layer = Layer(ValueSource.RECIPE, "t", {"model": "gpt2", "attention": "flash_attention_3"})
    assert rules.refusals(resolve.assemble([layer], name="t", machine=odd)) == ()


@pytest.mark.parametrize(
    ("raw", "option"),
    [
        (zero_block(stage=3), "zero"),
        (zero_block(offload_optimizer={"device": "cpu"}), "offload_optimizer"),
        (zero_block(offload_param={"device": "cpu"}), "offload_param"),
        ({"fp16": {"enabled": True}}, "precision"),
        ({"bf16": {"enabled": False}}, "precision"),
        ({"bfloat16": {"enabled": False}}, "precision"),
        ({"train_micro_batch_size_per_gpu": 2}, "micro_batch"),
        ({"gradient_accumulation_steps": 2}, "grad_accum"),
        ({"train_batch_size": 9}, "micro_batch x grad_accum x ranks"),
        ({"gradient_clipping": 0.5}, "max_grad_norm"),
        ({"optimizer": {"params": {"lr": 1.0}}}, "learning_rate"),
        ({"optimizer": {"params": {"weight_decay": 1.0}}}, "weight_decay"),
        ({"optimizer": {"params": {"eps": 1.0}}}, "adam_epsilon"),
        ({"optimizer": {"params": {"betas": [0.9, 0.999]}}}, "adam_beta1 and adam_beta2"),
    ],
)
def test_a_raw_key_must_not_contradict_its_option(raw: dict[str, Any], option: str) -> None:
    refusals = rules.refusals(spec(deepspeed=raw))
    assert [refusal.rule for refusal in refusals] == [f"contradiction of {option}"]
    assert option in refusals[0].what and "deepspeed." in refusals[0].what


def test_each_owned_key_is_tested() -> None:
    parameters = test_a_raw_key_must_not_contradict_its_option.pytestmark[0].args[1]
    assert len(parameters) == len(rules_deepspeed.OWNED)


def test_removed_blocks_are_those_of_the_installed_deepspeed() -> None:
    package = importlib.util.find_spec("deepspeed")
    if package is None or not package.submodule_search_locations:
        pytest.skip("deepspeed is not installed")
    source = Path(package.submodule_search_locations[0], "runtime", "config.py").read_text()
    keys: dict[str, set[str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            names = {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
            keys |= {target.id: names for target in node.targets if isinstance(target, ast.Name)}
    assert keys["_REMOVED_TOP_LEVEL_CONFIG_KEYS"] == rules_deepspeed.REMOVED_BLOCKS
    assert keys["_REMOVED_ZERO_CONFIG_KEYS"] == rules_deepspeed.REMOVED_ZERO_KEYS


@pytest.mark.parametrize("name", ["fp16", "float16", "torch.float16", "half"])
def test_every_spelling_of_the_own_precision_accumulates_at_stage_0(name: str) -> None:
    raw = {"data_types": {"grad_accum_dtype": name}}
    assert refused_by(precision="fp16", zero=0, deepspeed=raw) == []


@pytest.mark.parametrize(("dense", "refused"), [(2, []), (1, ["experts of ragged rows"])])
def test_experts_of_a_model_without_a_layer_of_them_are_not_looked_at(
    dense: int, refused: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(CONFIGS["NO_EXPERTS"].replace("DENSE", str(dense)))
    assert refused_by(model=str(path), precision="fp32") == refused

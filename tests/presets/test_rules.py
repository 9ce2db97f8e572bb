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
from llmtop.presets.spec import ValueSource
from tests.presets.rule_cases import BOX, CASES, CONFIGS, flag, refused_by, spec, with_model, zero_block

TABLES: tuple[Rule, ...] = (
    *rules.RULES,
    *rules_deepspeed.DEEPSPEED_RULES,
    *rules_optimizer.OPTIMIZER_RULES,
    *rules_engine.ENGINE_RULES,
)


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

"""Activation formulas against what torch's autograd really keeps of the real modelling code.

Two and three blocks of a small model of each family run forward on the CPU under saved-tensor hooks; the
difference is one block. LayerNorm statistics are half as wide on the CPU in bf16, hence the tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from llmtop.presets.hf.canonical import FAMILIES as KNOWN_FAMILIES
from llmtop.presets.hf.config import read_shape
from llmtop.presets.spec import GpuSpec, RunOptions, RunSpec
from llmtop.profiler.memory.assume import UNCOMPARED_FAMILIES
from llmtop.profiler.memory.backward import pass_bytes
from llmtop.profiler.memory.blocks import block_bytes
from llmtop.profiler.memory.result import Component
from llmtop.profiler.memory.sizes import sizes_of
from llmtop.profiler.memory.states import state_bytes
from llmtop.trainer.worker.adapters import add_lora
from llmtop.trainer.worker.kernels import enable_checkpointing

BATCH, LENGTH, VOCAB = 2, 64, 300
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
MULTI_HEAD = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LOCAL_EXPERTS = {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT: dict[str, Any] = {
    "n_embd": 64,
    "n_head": 8,
    "vocab_size": VOCAB,
    "n_positions": 512,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
LATENT: dict[str, Any] = {
    **MULTI_HEAD,
    "num_key_value_heads": 8,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "q_lora_rank": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "pad_token_id": 0,
}
WINDOW = {"head_dim": 8, "sliding_window": 32}
"""Shorter than a sequence."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "mistral": BASE,
    "ministral": {**BASE, "head_dim": 8},
    "mistral with a window": {**BASE, **WINDOW},
    "qwen2": BASE,
    "qwen2_moe": {**BASE, **EXPERTS, "shared_expert_intermediate_size": 56},
    "qwen3": {**BASE, "head_dim": 16},
    "gemma": {**BASE, "head_dim": 16},
    "gemma2": {**BASE, "head_dim": 16},
    "phi": MULTI_HEAD,
    "phi3": {**BASE, "pad_token_id": 0},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "codegen": {**GPT, "rotary_dim": 4},
    "gpt_neox": MULTI_HEAD,
    "opt": {**MULTI_HEAD, "ffn_dim": 160, "word_embed_proj_dim": 64, "dropout": 0.0},
    "bloom": {"hidden_size": 64, "n_head": 8, "vocab_size": VOCAB},
    "falcon": {**MULTI_HEAD, "multi_query": True, "parallel_attn": True, "bias": False},
    "falcon 40b": {**MULTI_HEAD, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": False},
    "falcon rw": {**MULTI_HEAD, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
    "mpt": {"d_model": 64, "n_heads": 8, "vocab_size": VOCAB, "max_seq_len": 512},
    "mixtral": LOCAL_EXPERTS,
    "phimoe": LOCAL_EXPERTS,
    "granitemoe": LOCAL_EXPERTS,
    "gpt_oss": {**LOCAL_EXPERTS, "head_dim": 8, "pad_token_id": 0},
    "qwen3_moe": {**BASE, "head_dim": 16, **EXPERTS},
    "gemma3_text": {**BASE, "head_dim": 16},
    "gemma3_text with one key": {
        **BASE,
        **WINDOW,
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention"] * 3,
    },
    "phi3 with a window": {**BASE, "sliding_window": 32, "pad_token_id": 0},
    "starcoder2 with a window": {**BASE, "sliding_window": 32},
    "gemma3_text with a window": {**BASE, **WINDOW, "layer_types": ["sliding_attention"] * 3},
    "olmo": BASE,
    "olmo2": BASE,
    "olmo3": BASE,
    "olmo3 with a window": {**BASE, **WINDOW, "layer_types": ["sliding_attention"] * 3},
    "olmoe": {**BASE, **EXPERTS},
    "exaone4": BASE,
    "cohere": BASE,
    "cohere2": BASE,
    "deepseek_v2": LATENT,
    "deepseek_v2 lite": {**LATENT, "q_lora_rank": None},
    "deepseek_v3": LATENT,
    "deepseek_v3 dense": {**LATENT, "first_k_dense_replace": 3},
    "glm": {**BASE, "head_dim": 8, "pad_token_id": 0},
    "glm4": {**BASE, "head_dim": 8, "pad_token_id": 0},
    "glm4_moe": {**LATENT, "num_key_value_heads": 2, "head_dim": 8},
    "granite": BASE,
    "smollm3": {**BASE, "pad_token_id": 0},
    "starcoder2": BASE,
    "stablelm": BASE,
    "nemotron": BASE,
    "ernie4_5": BASE,
    "arcee": BASE,
    "seed_oss": {**BASE, "attention_dropout": 0.0, "residual_dropout": 0.0},
}
EAGER_ONLY = {"gemma2", "bloom", "mpt", "gpt_oss", "deepseek_v2", "deepseek_v3"}
"""transformers 5.x has no SDPA for them; for DeepSeek the CPU has none that takes values of another width."""
CASES = [(family, "eager") for family in FAMILIES] + [
    (family, "sdpa") for family in FAMILIES if family.split()[0] not in EAGER_ONLY
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors of this size are shared out among threads at several times what they take alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(case: str, layers: int, attention: str, dtype: torch.dtype) -> tuple[Any, Any]:
    family, keys = case.split()[0], dict(FAMILIES[case])
    keys["num_hidden_layers"] = layers
    if "layer_types" in keys:
        keys["layer_types"] = keys["layer_types"][:layers]
    config = AutoConfig.for_model(family, use_cache=False, **keys)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return config, model.train()


def kept_bytes(model: Any) -> int:
    """Bytes of the distinct storages that the model's body keeps for backward, weights not included."""
    return sum(kept_storages(model).values())


def kept_storages(model: Any) -> dict[int, int]:
    """Those storages: address and bytes."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.numel():
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.base_model(input_ids=ids)
    sizes = {address: size for address, (size, _) in kept.items()}
    del output
    return sizes


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_a_block_keeps_what_the_formula_says(family: str, attention: str, precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    config, two = build(family, 2, attention, dtype)
    _, three = build(family, 3, attention, dtype)
    measured = (kept_bytes(three) - kept_bytes(two)) / (BATCH * LENGTH)
    spec = run_spec(config, family.split()[0], attention, precision)
    assert block_bytes(spec, sizes_of(spec)).saved == pytest.approx(measured, rel=0.012)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks it
@pytest.mark.parametrize("case", FAMILIES)
def test_a_block_with_adapters_keeps_what_the_formula_says(case: str) -> None:
    """Frozen weights need no inputs, and the adapters are where they are counted, none on routed experts."""
    family = case.split()[0]
    attention, measured = "eager" if family in EAGER_ONLY else "sdpa", []
    for layers in (2, 3):
        config, model = build(case, layers, attention, torch.bfloat16)
        spec = run_spec(config, family, attention, "bf16", lora_rank=4)
        wrapped = add_lora(model, spec)
        measured.append(kept_bytes(wrapped.base_model.model))
    sizes, (two, three) = sizes_of(spec), measured
    assert sum(weight.numel() for weight in wrapped.parameters() if weight.requires_grad) == sizes.trainable
    assert wrapped.base_model.model.config.model_type == family
    assert block_bytes(spec, sizes).saved == pytest.approx((three - two) / (BATCH * LENGTH), rel=0.012)


def test_every_family_that_is_called_compared_is() -> None:
    assert {case.split()[0] for case in FAMILIES} == KNOWN_FAMILIES.keys() - UNCOMPARED_FAMILIES


def run_spec(config: Any, family: str, attention: str, precision: str, **options: Any) -> RunSpec:
    keys = config.to_dict()
    return RunSpec(
        name="test",
        model=read_shape(keys, family, family),
        hf_config=keys,
        gpu=GpuSpec(name="cpu", kind="cpu"),
        model_source="",
        options=RunOptions(
            model=family,
            gpu="h200",
            precision="bf16" if precision == "bf16" else "fp32",
            attention="eager" if attention == "eager" else "sdpa",
            micro_batch=BATCH,
            seq_len=LENGTH,
            **options,
        ),
    )


LAYERS = 6


@pytest.mark.parametrize(
    ("family", "precision", "every", "reentrant"),
    [
        ("llama", "bf16", 2, False),
        ("llama", "bf16", 3, True),
        ("llama", "fp32", 2, True),
        ("llama", "fp32", 3, False),
        ("qwen3", "bf16", 2, False),
        ("gemma", "bf16", 3, False),
        ("gpt_neox", "bf16", 3, False),
        ("gpt_neox", "fp32", 2, False),
        ("gpt2", "bf16", 2, True),
        ("gpt2", "fp32", 3, False),
    ],
)
def test_every_kth_block_keeps_its_input_and_the_others_everything(
    family: str, precision: str, every: int, reentrant: bool
) -> None:
    """All blocks together, as what they keep beyond a model whose blocks are all checkpointed."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    config, model = build(family, LAYERS, "sdpa", dtype)
    kept = {}
    for step in (1, every):
        checkpoint_every(model, step, reentrant)
        kept[step] = kept_with_checkpoints(model)
    predicted = {
        step: _activations(
            run_spec(
                config,
                family,
                "sdpa",
                precision,
                gradient_checkpointing=True,
                checkpointing_every=step,
                checkpointing_reentrant=reentrant,
            )
        )
        for step in (1, every)
    }
    assert predicted[every] - predicted[1] == pytest.approx(kept[every] - kept[1], rel=0.012)


def checkpoint_every(model: Any, every: int, reentrant: bool) -> None:
    enable_checkpointing(model, reentrant=reentrant, every=every)
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert sum(block.gradient_checkpointing for block in blocks) == -(-LAYERS // every)


def kept_with_checkpoints(model: Any) -> int:
    """As `kept_bytes`, with what checkpointed blocks hold: their inputs, which no hook from outside sees."""
    inputs: dict[int, int] = {}

    def note(block: Any, arguments: tuple[Any, ...]) -> None:
        if block.gradient_checkpointing:
            storage = arguments[0].untyped_storage()
            inputs[storage.data_ptr()] = storage.nbytes()
            alive.append(arguments[0])

    alive: list[torch.Tensor] = []
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    hooks = [block.register_forward_pre_hook(note) for block in blocks]
    kept = kept_storages(model)
    for hook in hooks:
        hook.remove()
    return sum({**inputs, **kept}.values())


def _activations(spec: RunSpec) -> int:
    sizes = sizes_of(spec)
    return pass_bytes(spec, sizes, state_bytes(spec, sizes)).forward_end[Component.ACTIVATIONS]

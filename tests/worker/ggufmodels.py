"""Tiny models of every family that GGUF is written for, with real tokenizers, all made on the spot."""

from __future__ import annotations

import json
import math
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import torch

WIDE = 1 << 16
"""Of `large_model`'s MLP."""
IDS = [5, 77, 300, 12, 44, 91, 200, 333, 17, 8, 9, 10, 450, 23]
"""Tokens that every one of the models knows."""
_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_GEMMA = {"head_dim": 32, "tie_word_embeddings": True}
_GEMMA2 = _GEMMA | {"query_pre_attn_scalar": 32, "sliding_window": 8}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LOCAL = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 64},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "gemma": {"model_type": "gemma", **_GEMMA},
    "gemma2": {"model_type": "gemma2", **_GEMMA2},
    "gemma3": {"model_type": "gemma3_text", **_GEMMA2, "num_hidden_layers": 6},
    "phi3": {"model_type": "phi3"},
    "phi": {"model_type": "phi", "num_key_value_heads": 4},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", **_EXPERTS, "shared_expert_intermediate_size": 96},
    "qwen3_moe": {"model_type": "qwen3_moe", **_EXPERTS, "head_dim": 32, "norm_topk_prob": True},
    "llama biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama 3.1, tied": {"model_type": "llama", "rope_parameters": _LLAMA3, "tie_word_embeddings": True},
    "llama odd rows": {
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_key_value_heads": 1,
        "head_dim": 12,
    },
    "qwen2 yarn": {"model_type": "qwen2", "rope_parameters": _YARN},
    "gemma3 scaled": {
        "model_type": "gemma3_text",
        **_GEMMA2,
        "num_hidden_layers": 6,
        "rope_parameters": _LOCAL,
    },
    "phi3 long": {"model_type": "phi3", "original_max_position_embeddings": 8, "rope_parameters": _LONG},
}
DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "phi")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
FAMILIES = (*DENSE, *MIXTURES)


def make_model(folder: Path, case: str = "llama", *, tokenizer: bool = True, **changes: Any) -> Path:
    """A folder as transformers saves it, in bfloat16, every number of it random; norms and biases too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = _BASE | CASES[case] | changes
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    model = AutoModelForCausalLM.from_config(config)
    around = 0.0 if "gemma" in case else 1.0
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            numbers = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * numbers + around if "norm" in name else 0.2 * numbers)
    model.to(torch.bfloat16).save_pretrained(str(folder))
    if tokenizer:
        add_byte_level(folder)
    return folder


def large_model(folder: Path) -> Path:
    """One block whose MLP has three tensors of 64 MiB in bfloat16, 128 MiB in 32 bits."""
    small = make_model(folder / "small", intermediate_size=64, hidden_size=512, num_hidden_layers=1)
    config = json.loads((small / "config.json").read_text()) | {"intermediate_size": WIDE}
    large = folder / "large"
    large.mkdir()
    (large / "config.json").write_text(json.dumps(config))
    (large / "model.safetensors").write_bytes(b"")
    _stretch(small / "model.safetensors", large / "model.safetensors")
    return large


def _stretch(source: Path, target: Path) -> None:
    """The same tensors with a wide MLP, written piece by piece: the test's own process stays small too."""
    from llmtop.presets.tensorfile import read_header

    header = read_header(source)
    entries: dict[str, Any] = {}
    sizes, at = [], 0
    for name, entry in header.entries.items():
        shape = [WIDE if size == 64 and "mlp" in name else size for size in entry.shape]
        size = 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        sizes.append(size)
        at += size
    text = json.dumps(entries).encode()
    piece = numpy.random.default_rng(0).normal(size=1 << 20).astype(numpy.float32).view(numpy.uint32) >> 16
    numbers = piece.astype(numpy.uint16).tobytes()
    with target.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for size in sizes:
            for left in range(size, 0, -len(numbers)):
                file.write(numbers[: min(left, len(numbers))])


def logits(model: Any) -> torch.Tensor:
    """Of `IDS`, in the model's own precision."""
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(torch.tensor([IDS])).logits[0].float()
    return found


def load(folder: Path, **keys: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager", **keys
    )


def add_byte_level(folder: Path) -> None:
    """A byte-level BPE of 500 tokens, learned from Python's help; GPT-2's way to cut text."""
    for name, text in _byte_level():
        (folder / name).write_text(text)


@lru_cache(maxsize=1)
def _byte_level() -> tuple[tuple[str, str], ...]:
    import tempfile

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(help_texts()[:2], trainer)
    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>").save_pretrained(folder)
        names = ("tokenizer.json", "tokenizer_config.json")
        return tuple((name, (Path(folder) / name).read_text()) for name in names)


def help_texts() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def add_sentencepiece(folder: Path, *, as_json: bool) -> Path:
    """SentencePiece's own model, learned on the spot; with `as_json`, only what transformers makes of it.

    The path of SentencePiece's model, which stays outside of the folder then.
    """
    from sentencepiece import SentencePieceTrainer
    from transformers import LlamaTokenizer

    beside = folder.with_name(f"{folder.name}-sp")
    beside.mkdir()
    corpus, model = beside / "corpus.txt", beside / "tokenizer.model"
    corpus.write_text("\n".join(help_texts()[:20]))
    SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(model.with_suffix("")),
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        max_sentence_length=100_000,
        minloglevel=2,
    )
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "legacy": False,
    }
    (beside / "tokenizer_config.json").write_text(json.dumps(config))
    if as_json:
        LlamaTokenizer.from_pretrained(str(beside)).save_pretrained(str(folder))
    else:
        for name in ("tokenizer.model", "tokenizer_config.json"):
            shutil.copyfile(beside / name, folder / name)
    return model

"""What a folder of weights has besides them: configuration, generation settings, tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from llmtop.presets.errors import UsageError
from llmtop.presets.inputs import SMALLEST_BPE_VOCAB
from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.worker.build import DTYPES
from llmtop.trainer.worker.tokenizer import tokenizer_folder

GENERATION = "generation_config.json"
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Of all kinds that Transformers reads."""
_TEMPLATES = "additional_chat_templates"


def write_config(folder: Path, skeleton: Any, spec: RunSpec, dtype: str, *, tied: bool) -> None:
    """config.json and, for a model that can generate, its settings for that."""
    config = skeleton.config
    config.use_cache = spec.hf_config.get("use_cache", True)
    config.architectures = [type(skeleton).__name__]
    config.dtype = DTYPES[dtype]
    if not tied:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(folder)
    own = Path(spec.weights_dir) / GENERATION if spec.weights_dir else None
    if own is not None and own.is_file():
        shutil.copyfile(own, folder / GENERATION)
    elif skeleton.can_generate():
        skeleton.generation_config.save_pretrained(folder)


def copy_tokenizer(folder: Path, run: RunDir, spec: RunSpec) -> str:
    """The tokenizer that the run's text went through; in words why there is none, empty where there is."""
    if spec.options.tokenizer == "bytes":
        return "no tokenizer is with it: the run took the bytes of its text as tokens"
    try:
        source = tokenizer_folder(spec)
    except UsageError as error:
        return f"no tokenizer is with it: {error.in_one_line}"
    source = source or (run.tokenizer_dir if run.tokenizer_dir.is_dir() else None)
    if source is None:
        if spec.model.vocab_size < SMALLEST_BPE_VOCAB:
            return "no tokenizer is with it: the run took the bytes of its text as tokens"
        return "no tokenizer is with it: the run's own is not there any more"
    for name in _TOKENIZER:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, folder / _TEMPLATES)
    return ""

"""A model of half a billion weights and a text for it, from nothing but what a Python environment holds.

For benchmarks on machines without a network: the shape is a Llama's, the weights begin at random, and the
text is the source code of the packages that are installed.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16384,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 18,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_TINY_SHAPE = _SHAPE | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_RUN = {
    "grad_accum": 2,
    "gradient_checkpointing": False,
    "seq_len": 1024,
    "micro_batch": 16,
    "precision": "bf16",
    # DeepSpeed's own has to be compiled first.
    "optimizer": "adamw_torch",
    "learning_rate": 6e-4,
    "warmup_steps": 20,
}
_TINY_RUN = _RUN | {"seq_len": 64, "micro_batch": 4}
_TEXT_BYTES, _TINY_TEXT_BYTES = 40_000_000, 400_000
_LARGEST_FILE_BYTES = 400_000
"""Beyond it sources are mostly tables."""


def settings(*, tiny: bool) -> dict[str, Any]:
    """What `benchmarks.qat` takes by default for it; `tiny` goes the same way in a minute on a CPU."""
    return {
        "recipe": "full-zero2",
        "shape": _TINY_SHAPE if tiny else _SHAPE,
        "run": _TINY_RUN if tiny else _RUN,
        "text_bytes": _TINY_TEXT_BYTES if tiny else _TEXT_BYTES,
        "steps": 12 if tiny else 180,
        "more_steps": 4 if tiny else 40,
        "more_rate": 1e-4,
        "seeds": 1,
        "windows": 16 if tiny else 192,
    }


def write_shape(folder: Path, shape: dict[str, Any]) -> Path:
    """A config.json, by whose path a run starts from random weights."""
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(shape))
    return path


def installed_sources(most_bytes: int) -> list[str]:
    """So much of Python's own library and of the packages beside it, the same files each time."""
    found, taken = [], 0
    for path in _files():
        if taken >= most_bytes:
            break
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a test of other encodings
        found.append(text)
        taken += len(text)
    return found


def _files() -> Iterator[Path]:
    for name in ("stdlib", "purelib"):
        root = Path(sysconfig.get_path(name))
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root).parts
            if "site-packages" not in inside and 0 < path.stat().st_size <= _LARGEST_FILE_BYTES:
                yield path

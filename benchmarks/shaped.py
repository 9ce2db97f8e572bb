"""A folder of random weights in the shape of a model preset, without torch and without a download.

For benchmarks of what reads weights: an 8B has the tensors, the vocabulary and the merges of an 8B.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy
from msgspec.structs import replace

from llmtop.presets import catalog
from llmtop.presets.spec import ModelShape
from llmtop.trainer.quantize.bytetokenizer import write_byte_tokenizer
from llmtop.trainer.quantize.families import family_of
from llmtop.trainer.quantize.layout import expected

_PIECE = 1 << 22
"""Random numbers that are drawn once and written again and again."""
_SCALE = 0.02


def write_shaped(folder: Path, preset: str, layers: int | None = None) -> None:
    """All tensors in bfloat16, with a vocabulary of as many tokens; with `layers`, of so many blocks only."""
    loaded = catalog.load_model(preset)
    shape = loaded.shape if layers is None else replace(loaded.shape, num_layers=layers)
    folder.mkdir(parents=True)
    config = {**loaded.hf_config, "num_hidden_layers": shape.num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    _write_weights(folder / "model.safetensors", shape)
    write_byte_tokenizer(folder, shape.vocab_size)
    _fill_vocabulary(folder / "tokenizer.json", shape.vocab_size)


def _write_weights(path: Path, shape: ModelShape) -> None:
    tensors = expected(shape, family_of(shape, shape.name))
    entries, at = {}, 0
    for name, size in tensors.items():
        after = at + 2 * math.prod(size)
        entries[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, after]}
        at = after
    header = json.dumps(entries).encode()
    drawn = numpy.random.default_rng(0).normal(scale=_SCALE, size=_PIECE).astype(numpy.float32)
    piece = (drawn.view(numpy.uint32) >> 16).astype(numpy.uint16).tobytes()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for size in tensors.values():
            for left in range(2 * math.prod(size), 0, -len(piece)):
                file.write(piece[: min(left, len(piece))])


def _fill_vocabulary(path: Path, size: int) -> None:
    """Tokens of two and three letters and their merges, as many as the embedding has rows."""
    tokenizer = json.loads(path.read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    letters = list(vocabulary)
    row = len(letters) + 1  # behind the end of text
    merges: list[list[str]] = []
    parts = iter([(first, second) for first in letters for second in letters])
    pairs = [one + two for one in letters for two in letters]
    for first, second in (*parts, *((pair, letter) for pair in pairs for letter in letters[:8])):
        if row >= size:
            break
        vocabulary[first + second] = row
        merges.append([first, second])
        row += 1
    tokenizer["model"]["merges"] = merges
    path.write_text(json.dumps(tokenizer))

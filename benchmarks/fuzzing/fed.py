"""Cases made from bytes: what atheris changes, and what is kept of a case that failed."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

from benchmarks.fuzzing.making import Maker
from benchmarks.fuzzing.target import Target

FILES = {
    "recipe TOML": "recipe.toml",
    "Hugging Face config.json": "config.json",
    "DeepSpeed JSON": "ds.json",
    "hostfile and its filters": "hostfile",
    "GGUF header given as a model": "model.gguf",
    "control requests": "control/1.json",
    "safetensors header": "model.safetensors",
    "checkpoint marker and index": "step-4/index.json",
    "lines of events": "rank-0.jsonl",
}
"""Target to the file that an input may be."""


class Fed(random.Random):
    """Dice whose throws are bytes; when they are used up, those of a seed that the bytes give."""

    def __init__(self, content: bytes) -> None:
        super().__init__(zlib.crc32(content))
        self._content, self._at = content, 0

    def getrandbits(self, k: int, /) -> int:
        size = (k + 7) // 8
        part = self._content[self._at : self._at + size]
        if len(part) < size:
            return super().getrandbits(k)
        self._at += size
        return int.from_bytes(part, "little") >> (8 * size - k)

    def random(self) -> float:
        return self.getrandbits(16) / 65536


def case_of(target: Target, content: bytes) -> Target:
    """The target with a case made from bytes."""
    file = FILES.get(target.name)
    rest = content[1:]

    def make(maker: Maker, folder: Path) -> None:
        if file is None or not content or content[0] % 2 == 0:
            target.make(Maker(Fed(rest)), folder)
            return
        target.make(Maker(random.Random(zlib.crc32(rest))), folder)
        (folder / file).write_bytes(rest)

    return type(target)(name=target.name, make=make, act=target.act)

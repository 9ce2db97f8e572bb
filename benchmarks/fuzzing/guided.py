"""The same targets with atheris at the dice: inputs that reach new lines of ours are changed further.

Atheris is no dependency of anything here: `pip install atheris` gets it. An input is bytes; the first of them
says what the others are: the throws of the dice from which a target makes its case, or, where the target
reads one file of its own, that file itself.

    python -m benchmarks.fuzzing.guided TARGET FIRST COUNT PLACE       as `benchmarks.fuzz` calls it
"""

from __future__ import annotations

import base64
import importlib
import json
import mmap
import os
import random
import re
import resource
import struct
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.fuzzing.target import Target

MODULE = "benchmarks.fuzzing.guided"
HOW_TO_GET_IT = "atheris is not installed: pip install atheris (Linux, CPython 3.11 to 3.13)"
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
_LONGEST_BYTES = 4096
_SEEDS = 40
_COVERED = re.compile(r"\bcov: (\d+)")


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


def told_edges(stderr: str) -> int | None:
    """How many branches were reached, by what libFuzzer printed last; None where it has printed nothing."""
    found = _COVERED.findall(stderr)
    return int(found[-1]) if found else None


def case_of(target: Target, content: bytes) -> Target:
    """The target with a case made from bytes."""
    from benchmarks.fuzzing.making import Maker

    file = FILES.get(target.name)
    rest = content[1:]

    def make(maker: Maker, folder: Path) -> None:
        if file is None or not content or content[0] % 2 == 0:
            target.make(Maker(Fed(rest)), folder)
            return
        target.make(Maker(random.Random(zlib.crc32(rest))), folder)
        (folder / file).write_bytes(rest)

    return type(target)(name=target.name, make=make, act=target.act)


def _seed_corpus(target: Target, corpus: Path, place: Path) -> None:
    """What is made by number, as throws of the dice and as files."""
    from benchmarks.fuzzing.running import maker_of
    from benchmarks.fuzzing.target import place_of

    for number in range(_SEEDS):
        throws = random.Random(f"{target.name}:{number}").randbytes(16 << number % 8)
        (corpus / f"dice-{number}").write_bytes(b"\0" + throws)
        if file := FILES.get(target.name):
            folder = place_of(place)
            target.make(maker_of(target, number), folder)
            if (folder / file).exists():
                content = (folder / file).read_bytes()[: _LONGEST_BYTES - 1]
                (corpus / f"file-{number}").write_bytes(b"\1" + content)


def main(name: str, first: int, count: int, place: Path) -> None:
    """Runs the cases and prints what came of them as one line; the process ends with the last of them."""
    atheris = importlib.import_module("atheris")  # not installed where types are checked
    with atheris.instrument_imports(include=["llmtop"]):
        from benchmarks.fuzzing.running import Tally
        from benchmarks.fuzzing.table import target as target_of
        from benchmarks.fuzzing.target import prepared
    target = target_of(name)
    prepared(target, place / "cases")
    corpus = place / f"corpus-{zlib.crc32(name.encode()):08x}"
    if not corpus.is_dir():
        # Later parts go on from what earlier ones have found.
        corpus.mkdir()
        _seed_corpus(target, corpus, place / "cases")
    tally, number = Tally(), first
    dice = random.Random(0)
    with (place / "at").open("r+b") as file, mmap.mmap(file.fileno(), 8) as at:

        def each(content: bytes) -> None:
            nonlocal number
            at[:8] = struct.pack("<Q", number)
            failed = len(tally.failures)
            from benchmarks.fuzzing.making import Maker

            tally.count(case_of(target, content), Maker(dice), place / "cases", number)
            for failure in tally.failures[failed:]:
                failure["input"] = base64.b64encode(content).decode()
            number += 1
            if number == first + count:
                print(json.dumps(tally.told()), flush=True)
                os._exit(0)  # libFuzzer would go on, or end the process its own way

        options = [f"-max_len={_LONGEST_BYTES}", f"-seed={first + 1}", "-timeout=100", "-rss_limit_mb=8192"]
        atheris.Setup([sys.argv[0], *options, str(corpus)], each)
        atheris.Fuzz()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))

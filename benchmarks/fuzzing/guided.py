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
_LONGEST_BYTES = 4096
_SEEDS = 40
_COVERED = re.compile(r"\bcov: (\d+)")


def told_edges(stderr: str) -> int | None:
    """How many branches were reached, by what libFuzzer printed last; None where it has printed nothing."""
    found = _COVERED.findall(stderr)
    return int(found[-1]) if found else None


def _seed_corpus(target: Target, corpus: Path, place: Path) -> None:
    """What is made by number, as throws of the dice and as files."""
    from benchmarks.fuzzing.fed import FILES
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
        from benchmarks.fuzzing.fed import case_of
        from benchmarks.fuzzing.making import Maker
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

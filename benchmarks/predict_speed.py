"""Time of one memory prediction, as a multiple of a fixed piece of work on the same machine.

    python benchmarks/predict_speed.py [--out FILE]

Prints and appends one JSON line: microseconds a call (best of several rounds), the same for hashing
64 KiB, and their ratio, which other machines can be compared by.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import timeit
from collections.abc import Callable
from pathlib import Path

from llmtop.presets.catalog import load_recipe
from llmtop.presets.resolve import Layer, Machine, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.memory.predict import predict

ROUNDS = 7
RECIPES = ("full-zero2", "zero3-offload", "qlora-nf4", "long-context-16k", "cpu-demo")


def microseconds(call: Callable[[], object], number: int) -> float:
    return min(timeit.repeat(call, number=number, repeat=ROUNDS)) / number * 1e6


def spec_of(recipe: str) -> RunSpec:
    values = {"gpu": "h200", **load_recipe(recipe).values}
    layer = Layer(source=ValueSource.RECIPE, detail=recipe, values=values)
    return resolve([layer], name=recipe, machine=Machine(gpu="h200", gpus=1, host_memory_bytes=None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "predict_speed.jsonl")
    out: Path = parser.parse_args().out
    block = bytes(65536)
    for recipe in RECIPES:
        spec = spec_of(recipe)
        hashing = microseconds(lambda: hashlib.sha256(block).digest(), 2000)
        calling = microseconds(lambda spec=spec: predict(spec), 1000)  # type: ignore[misc]
        row = {
            "recipe": recipe,
            "predict_microseconds": round(calling, 1),
            "sha256_64kib_microseconds": round(hashing, 1),
            "ratio": round(calling / hashing, 2),
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        print(json.dumps(row))
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as log:
            log.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

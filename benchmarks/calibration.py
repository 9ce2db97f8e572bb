"""G5: step time predicted after `llmtop calibrate` on this machine against real runs; a row for each.

    python -m benchmarks.calibration --out benchmarks/results/calibration_cpu.jsonl
    python -m benchmarks.calibration --gpu --out benchmarks/results/calibration_h200.jsonl

Calibrates first at the model's shapes, predicts with and without, then trains for some steps. On an idle
machine; what else runs there is told by the spread of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = 25
KEPT = ("took_seconds", "processor", "versions", "figures")
_CPU = ("cpu-demo", "--gpus", "1", "--classify-every", "0", "--threads-per-rank", "1")
_GPU = (
    "full-zero2",
    "--gpus",
    "1",
    "--classify-every",
    "0",
    "--grad-accum",
    "1",
    "--optimizer",
    "adamw_torch",
)
CASES: tuple[tuple[str, ...], ...] = (
    (*_CPU, "--micro-batch", "8", "--seq-len", "128"),
    (*_CPU, "--micro-batch", "2", "--seq-len", "128"),
    (*_CPU, "--micro-batch", "16", "--seq-len", "128"),
    (*_CPU, "--micro-batch", "4", "--seq-len", "512"),
    (*_CPU, "--micro-batch", "8", "--seq-len", "128", "--gradient-checkpointing"),
    (*_CPU, "--micro-batch", "8", "--seq-len", "128", "--zero", "0"),
)
GPU_CASES: tuple[tuple[str, ...], ...] = (
    (*_GPU, "--model", "llama-3.2-1b", "--micro-batch", "4", "--seq-len", "2048", "--attention", "sdpa"),
    (
        *_GPU,
        "--model",
        "qwen2.5-0.5b",
        "--micro-batch",
        "8",
        "--seq-len",
        "1024",
        "--no-gradient-checkpointing",
    ),
    (*_GPU, "--model", "llama-3.2-3b", "--micro-batch", "2", "--seq-len", "4096", "--liger"),
    (*_GPU, "--model", "smollm2-360m", "--micro-batch", "4", "--seq-len", "512", "--zero", "1"),
)


def llmtop(*words: str, folder: Path) -> str:
    environment = {
        **os.environ,
        "LLMTOP_RUNS_DIR": str(folder / "runs"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    code = f"from llmtop.tui.cli import main; raise SystemExit(main({list(words)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"llmtop {' '.join(words)}: {done.stderr[-800:]}")
    return done.stdout


def row(case: tuple[str, ...], folder: Path) -> dict[str, Any]:
    calibration = json.loads(llmtop("calibrate", *case, "--json", folder=folder))
    after = json.loads(llmtop("plan", *case, "--json", folder=folder))["step_seconds"]
    before = json.loads(llmtop("plan", *case, "--no-calibration", "--json", folder=folder))["step_seconds"]
    llmtop("run", *case, "--steps", str(STEPS), "--headless", folder=folder)
    measured = json.loads(llmtop("report", "latest", "--json", folder=folder))["step_seconds"]
    return {
        "gpu": calibration["gpu"],
        "options": " ".join(case),
        "predicted_before_seconds": before,
        "predicted_after_seconds": after,
        "measured_seconds": measured,
        "error_percent": 100 * (after / measured - 1),
        "calibration": {key: calibration[key] for key in KEPT},
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file to append the rows to")
    parser.add_argument(
        "--gpu", action="store_true", help="cases for one GPU in place of those of the CPU kind"
    )
    parser.add_argument("--cases", type=int, help="the first so many; default: all")
    options = parser.parse_args()
    cases = GPU_CASES if options.gpu else CASES
    errors = []
    for case in cases[: options.cases]:
        with tempfile.TemporaryDirectory() as folder:
            found = row(case, Path(folder))
        errors.append(abs(found["error_percent"]))
        print(json.dumps({key: value for key, value in found.items() if key != "calibration"}), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
    print(f"mean error {statistics.fmean(errors):.1f} %, worst {max(errors):.1f} %")


if __name__ == "__main__":
    main()

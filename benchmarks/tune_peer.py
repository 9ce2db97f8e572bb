"""`deepspeed --autotuning` beside `llmtop tune` on a small case: `python -m benchmarks.tune --peer`.

The autotuner needs the package `tabulate`, and `pdsh` to kill what is left of an experiment; where that is
not installed a program of that name that does nothing stands for it. It does not keep the global batch, so
both answers are compared by the tokens a second that one and the same trial of ours measures of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from shutil import which
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.rows import Row
from llmtop.presets.errors import JobFailedError, UsageError
from llmtop.presets.spec import RunSpec
from llmtop.trainer.supervisor.rankenv import threads_of
from llmtop.trainer.tune.trial import STEPS, Start, run_trial, trial_spec

SPEC = "LLMTOP_PEER_SPEC"
"""As `autotuned_script` reads it."""
_SCRIPT = Path(__file__).with_name("autotuned_script.py")
_OUTSIDE_TUNING = "#!/bin/sh\nexit 0\n"
_EXPERIMENT = re.compile(r"Done running exp_id = (\d+)")


def autotune(spec: RunSpec, root: Path, seconds: float) -> Row:
    """One call of the autotuner, in its fast mode, which is its default."""
    if importlib.util.find_spec("tabulate") is None:
        raise UsageError("DeepSpeed's autotuner needs the package tabulate", fix="pip install tabulate")
    root.mkdir(parents=True)
    (root / "ds.json").write_text(json.dumps(_config(spec)))
    log = root / "autotuning.log"
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("deepspeed")), "--autotuning", "tune", "--num_gpus",
             str(spec.options.gpus), str(_SCRIPT), "--deepspeed", "--deepspeed_config", "ds.json"],
            cwd=root,
            env=_environment(spec, root),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    wall = time.monotonic() - began
    best = root / "autotuning_results" / "ds_config_optimal.json"
    if not best.exists():
        words = log.read_text(errors="replace").strip().splitlines()
        raise JobFailedError(f"the autotuner found nothing in {wall:.0f} s", why=" / ".join(words[-3:])[:600])
    found = json.loads(best.read_text())
    return {
        "minutes": round(wall / 60, 2),
        "runs": len(set(_EXPERIMENT.findall(log.read_text(errors="replace")))),
        "micro_batch": found["train_micro_batch_size_per_gpu"],
        "grad_accum": found["gradient_accumulation_steps"],
        "zero": found["zero_optimization"]["stage"],
    }


def _config(spec: RunSpec) -> dict[str, Any]:
    options = spec.options
    return {
        "train_batch_size": spec.global_batch,
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": options.grad_accum,
        "optimizer": {"type": "AdamW", "params": {"lr": options.learning_rate, "torch_adam": True}},
        "zero_optimization": {"stage": options.zero},
        # It measures as many steps as a trial of ours at most, and a batch no larger than the given one.
        "autotuning": {
            "enabled": True,
            "fast": True,
            "overwrite": True,
            "max_train_batch_size": spec.global_batch,
            "start_profile_step": 3,
            "end_profile_step": STEPS,
        },
    }


def _environment(spec: RunSpec, root: Path) -> Mapping[str, str]:
    path = os.environ["PATH"]
    if which("pdsh") is None:
        stand_in = root / "bin" / "pdsh"
        stand_in.parent.mkdir()
        stand_in.write_text(_OUTSIDE_TUNING)
        stand_in.chmod(0o700)
        path = f"{stand_in.parent}:{path}"
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{path}",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(threads_of(spec, os.environ)),
        SPEC: msgspec.json.encode(spec).decode(),
    }


def rate(spec: RunSpec, values: Mapping[str, Any], root: Path, start: Start) -> float | None:
    """Tokens a second of a setting, by a trial of ours."""
    chosen = replace(spec, options=replace(spec.options, **values))
    got = run_trial(trial_spec(chosen), root, 120.0, best_step_seconds=None, show=lambda state, left: None,
                    start=start, early=False)  # fmt: skip
    return chosen.tokens_per_step / got.step_seconds if got.step_seconds else None


def peer_text(row: Row) -> str:
    """Both answers in a few lines."""
    lines = [f"{row['cell']['case']}: llmtop tune{_how(row)} beside deepspeed --autotuning"]
    for who, words in (("ours", "llmtop"), ("theirs", "deepspeed")):
        rates = [one for one in row["tokens_per_second"][who] if one]
        told = f"{statistics.median(rates):,.0f} tokens/s" if rates else "n/a"
        lines.append(f"  {words:<10}{row[who]['runs']:>3} runs {row[who]['minutes']:>6} minutes  {told}")
    if row["their_global_batch"] != row["global_batch"]:
        lines.append(f"  global batch {row['their_global_batch']} in place of {row['global_batch']}")
    return "\n".join(lines)


def _how(row: Row) -> str:
    return ", imports in each trial," if row["cell"].get("fresh") else ""

"""The only module that knows where runs live and what their files are called.

A run is a folder of mode 0700:
    spec.json            the resolved RunSpec
    prediction.json      the Prediction made before launch
    deepspeed.json       the DeepSpeed configuration that the ranks use
    supervisor.jsonl     events of the supervisor
    hardware.jsonl       events of the sampler
    rank-N.jsonl         events of rank N
    rank-N.log           stdout and stderr of rank N
    supervisor.log       stdout and stderr of the supervisor (empty unless it has a bug)
    control/ID.json      requests, written aside and renamed
    checkpoints/         what the trainer saves
    supervisor.pid       pid and start time, for telling a live supervisor from a reused pid
"""

from __future__ import annotations

import os
from pathlib import Path


def runs_root() -> Path:
    """`$LLMTOP_RUNS_DIR`, else `$XDG_STATE_HOME/llmtop/runs`, else `~/.local/state/llmtop/runs`."""
    explicit = os.environ.get("LLMTOP_RUNS_DIR")
    if explicit:
        return Path(explicit)
    state = os.environ.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local" / "state"
    return base / "llmtop" / "runs"

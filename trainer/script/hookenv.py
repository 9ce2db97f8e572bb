"""The environment of a script: all that it would have, and the hook that Python loads when it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.scriptevents import HOOKED_RUN
from llmtop.trainer.supervisor.rankenv import RUN_ID

SITE = Path(__file__).resolve().parents[2] / "profiler" / "probes" / "script" / "site"
"""A folder with nothing but the hook's `sitecustomize`."""


def script_environment(run: RunDir, environment: Mapping[str, str]) -> dict[str, str]:
    """On top of the environment that llmtop was called in; nothing of that is taken away."""
    path = environment.get("PYTHONPATH", "")
    return {
        **environment,
        RUN_ID: run.run_id,
        HOOKED_RUN: str(run.path.resolve()),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SITE), path))),
    }

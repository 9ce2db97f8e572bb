"""What this machine has not got for a run, told for thousands of runs in a row."""

from __future__ import annotations

from collections.abc import Callable

from llmtop.presets.spec import RunSpec
from llmtop.trainer.preflight import Need, needs


def lacking() -> Callable[[RunSpec], str]:
    """Words for the first thing that is missing, empty for nothing. Each module is looked for once."""
    missing: dict[Need, bool] = {}

    def lacks(spec: RunSpec) -> str:
        for need in needs(spec):
            if need not in missing:
                missing[need] = need.missing
            if missing[need]:
                return f"{need.name} is not installed, and {need.because}"
        return ""

    return lacks

"""Prediction against measurement to findings: each with its severity, its evidence and the next change."""

from __future__ import annotations

import re

from msgspec.structs import replace

from llmtop.presets.spec import RunSpec
from llmtop.profiler.breakdown import breakdown
from llmtop.profiler.findings.bound import BOUND_RULES
from llmtop.profiler.findings.clocks import CLOCK_RULES
from llmtop.profiler.findings.devices import DEVICE_RULES
from llmtop.profiler.findings.finding import Finding, Rule, Seen, Severity, worst_first
from llmtop.profiler.findings.health import HEALTH_RULES
from llmtop.profiler.findings.host import HOST_RULES
from llmtop.profiler.findings.memory import MEMORY_RULES
from llmtop.profiler.findings.nvme import NVME_RULES
from llmtop.profiler.findings.processors import PROCESSOR_RULES
from llmtop.profiler.findings.seen import SEEN_RULES
from llmtop.profiler.findings.speed import SPEED_RULES
from llmtop.profiler.findings.startup import STARTUP_RULES
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.result import Prediction

__all__ = ["Finding", "Severity", "findings"]

_RULES: tuple[Rule, ...] = (
    *HEALTH_RULES,
    *DEVICE_RULES,
    *MEMORY_RULES,
    *HOST_RULES,
    *PROCESSOR_RULES,
    *SPEED_RULES,
    *BOUND_RULES,
    *STARTUP_RULES,
    *NVME_RULES,
    *SEEN_RULES,
    *CLOCK_RULES,
)

_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]+)")
_OWN_SETTINGS = "the script's own settings"
_CHANGING = re.compile(r"\bllmtop (set|resume|run) ")


def findings(state: RunState, spec: RunSpec, prediction: Prediction) -> tuple[Finding, ...]:
    """What stands out so far, the worst first."""
    seen = Seen(state=state, spec=spec, prediction=prediction, breakdown=breakdown(state, spec, prediction))
    found = [finding for rule in _RULES for finding in rule(seen)]
    return worst_first(found if spec.script is None else map(_for_a_script, found))


def _for_a_script(finding: Finding) -> Finding:
    """The same without what only llmtop's own trainer takes: a command that changes the run, options."""
    change, command = finding.change, finding.command
    if _OPTION.search(change) and "nvidia-smi" not in change:
        change = _OPTION.sub(r"\1", change)
        change += "" if _OWN_SETTINGS in change else f"; in llmtop's words: change {_OWN_SETTINGS} to match"
    return replace(finding, change=change, command="" if _CHANGING.search(command) else command)

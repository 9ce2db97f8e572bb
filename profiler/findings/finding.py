"""What a finding is, and what the rules that make them may look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.breakdown import Breakdown
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.runstate import RunState

Severity = Literal["critical", "warning", "info"]

STEADY_STEPS = 3
"""Steps after warm-up before anything is said about speed."""


class Finding(Struct, frozen=True, kw_only=True):
    """One thing worth knowing: the limit that was met, what shows it, what would change it."""

    key: str
    """Stable name for scripts and tests."""
    severity: Severity
    title: str
    evidence: str
    """The measured numbers."""
    change: str
    """The next thing to do; empty when there is nothing to do."""


class Seen(Struct, frozen=True, kw_only=True):
    """Everything that a rule may look at."""

    state: RunState
    spec: RunSpec
    prediction: Prediction
    breakdown: Breakdown


def words(name: str) -> str:
    """A component, moment or stage as people write it."""
    return name.replace("_", " ")


def first_line(text: str) -> str:
    """Of an error message, which may hold a whole traceback; without its full stop."""
    return text.strip().partition("\n")[0].rstrip(". ")


Rule = Callable[[Seen], Iterator[Finding]]

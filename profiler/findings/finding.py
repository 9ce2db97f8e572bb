"""What a finding is, and what the rules that make them may look at."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.breakdown import Breakdown
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.result import Prediction

Severity = Literal["critical", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")
"""The worst first."""

STEADY_STEPS = 3
"""Steps after warm-up before anything is said about speed."""


NEW_RUN = frozenset({"precision", "lora_rank", "lora_alpha", "lora_targets", "warmup_steps", "data"})
"""Options that a live run cannot change, of those that findings and suggestions name."""


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
    command: str = ""
    """A command line that does it; empty where it is not one command."""


_AnyFinding = TypeVar("_AnyFinding", bound=Finding)


def worst_first(found: Iterable[_AnyFinding]) -> tuple[_AnyFinding, ...]:
    """Equal ones stay in their order."""
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


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


def set_command(run_id: str, change: dict[str, object]) -> str:
    """The command that changes a live run so; empty where a key of it needs a new run."""
    if not change or not run_id or NEW_RUN & change.keys():
        return ""
    return shlex.join(("llmtop", "set", run_id, *change_words(change)))


def change_words(change: dict[str, object]) -> tuple[str, ...]:
    """As `key=value`, in the order of the change."""
    return tuple(f"{key}={_value_text(value)}" for key, value in change.items())


def _value_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


Rule = Callable[[Seen], Iterator[Finding]]

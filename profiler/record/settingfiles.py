"""The documents of one setting of a run, and which setting is in force."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from llmtop.presets.errors import LlmtopError
from llmtop.presets.foreign import read_json, why_unreadable
from llmtop.presets.possible import impossible
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.wholefile import document, write_atomic

SPEC = "spec.json"
PREDICTION = "prediction.json"
DEEPSPEED = "deepspeed.json"
IN_FORCE = "in-force.json"
_T = TypeVar("_T")


class InForce(Struct, frozen=True, kw_only=True):
    """The setting that a run trains on."""

    setting: int = 0
    """0: as launched."""
    fall_back: int | None = None
    """While the setting has not proved itself: the one to go back to."""
    ended_on: int | None = None
    """Of a run that is to go on with another setting than it ended with: the one that it ended with. Its next
    supervisor takes that into the record."""


def write_setting(
    folder: Path, spec: RunSpec, prediction: Prediction, deepspeed_config: dict[str, Any]
) -> None:
    """Its three documents."""
    write_atomic(folder / SPEC, document(spec))
    write_atomic(folder / PREDICTION, document(prediction))
    write_atomic(folder / DEEPSPEED, document(deepspeed_config))


def read_document(path: Path, kind: type[_T]) -> _T:
    """Raises LlmtopError for one that is not there or damaged."""
    try:
        return read_json(path, kind)
    except (OSError, msgspec.MsgspecError) as error:
        why = why_unreadable(error)
    raise LlmtopError(
        f"cannot read {path}",
        why=why,
        fix="another version of llmtop made the run, or it is damaged; remove its folder if it is not needed",
    )


def read_spec(path: Path) -> RunSpec:
    """Raises LlmtopError as `read_document`, and for one of no run."""
    spec = read_document(path, RunSpec)
    if problem := impossible(spec):
        raise LlmtopError(
            f"cannot read {path}", why=problem, fix="remove the run's folder if it is not needed"
        )
    return spec

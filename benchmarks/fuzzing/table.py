"""Every target of the fuzzing."""

from __future__ import annotations

from benchmarks.fuzzing import logs, records, settings
from benchmarks.fuzzing.target import Target

TARGETS: tuple[Target, ...] = (*settings.TARGETS, *records.TARGETS, *logs.TARGETS)


def target(name: str) -> Target:
    return next(one for one in TARGETS if one.name == name)

"""Looking on: an app that changes nothing, whatever its screens ask for."""

from __future__ import annotations

from typing import Any, NoReturn

from msgspec.structs import replace

from llmtop.presets.errors import UsageError
from llmtop.tui.asking.deeds import Deeds

_ONLY_LOOK = ("detect", "gpus", "bring")


def refusing(deeds: Deeds) -> Deeds:
    """The same, all that changes something refused: a deed that is added later too."""

    def refuse(*_: Any) -> NoReturn:
        raise UsageError(
            "nothing is changed from here",
            why="llmtop was started with --read-only",
            fix="start it without",
        )

    return replace(deeds, **{name: refuse for name in deeds.__struct_fields__ if name not in _ONLY_LOOK})

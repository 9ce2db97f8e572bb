"""Which rank this process is, as its launcher said in the environment."""

from __future__ import annotations

import os

from msgspec import Struct

from llmtop.presets.errors import UsageError


class Place(Struct, frozen=True, kw_only=True):
    """One process among those of the job."""

    rank: int
    local_rank: int
    """Index among the ranks of this machine; also the index of its GPU among the visible ones."""
    world_size: int
    local_world_size: int

    @property
    def source(self) -> str:
        """The name that this rank's events carry."""
        return f"rank{self.rank}"


def place_from_environment() -> Place:
    """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE."""
    return Place(
        rank=_number("RANK"),
        local_rank=_number("LOCAL_RANK"),
        world_size=_number("WORLD_SIZE"),
        local_world_size=_number("LOCAL_WORLD_SIZE"),
    )


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdigit():
        raise UsageError(
            f"{name} is {text!r} in the environment",
            why="a rank learns its place from RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE",
            fix="start runs with 'llmtop run', which sets them",
        )
    return int(text)

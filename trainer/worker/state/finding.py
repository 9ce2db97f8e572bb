"""Where in the files of a state the elements lie that a rank needs, for any layout that it has now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from llmtop.presets.errors import LlmtopError
from llmtop.trainer.statefile import Piece, StateIndex, StoredParameter, StoredSlab
from llmtop.trainer.worker.state.names import Named
from llmtop.trainer.worker.state.shardfile import ShardReader


class Found(Struct, frozen=True, kw_only=True):
    """A run of elements in a stored slab, and where in the rank's own slab it belongs."""

    file: str
    slab: StoredSlab
    source: int
    target: int
    count: int


class Stored:
    """An index, its files open, and what in it belongs to the parameters of this model."""

    def __init__(self, folder: Path, index: StateIndex, named: Sequence[Named]) -> None:
        self.index = index
        self._folder = folder
        self._readers: dict[str, ShardReader] = {}
        by_name = {
            name: (number, stored)
            for number, stored in enumerate(index.parameters)
            for name in (stored.name, *stored.aliases)
        }
        self._numbers = {one.number: by_name[one.name][0] for one in named if one.name in by_name}
        self._runs: dict[int, list[tuple[Piece, str, StoredSlab]]] = {}
        for file in index.files:
            for slab in file.slabs:
                for piece in slab.pieces:
                    self._runs.setdefault(piece.parameter, []).append((piece, file.name, slab))
        for runs in self._runs.values():
            runs.sort(key=lambda run: run[0].start)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def reader(self, file: str) -> ShardReader:
        if file not in self._readers:
            self._readers[file] = ShardReader(self._folder / file)
        return self._readers[file]

    def parameter(self, number: int) -> StoredParameter | None:
        """What the state knows of the model's parameter of this number."""
        at = self._numbers.get(number)
        return None if at is None else self.index.parameters[at]

    def find(self, pieces: Sequence[Piece], name_of: Callable[[int], str]) -> list[Found]:
        """Every element of the pieces, neighbours as one run. LlmtopError where one is missing."""
        found: list[Found] = []
        for piece in pieces:
            covered = piece.start
            end = piece.start + piece.count
            for stored, file, slab in self._runs.get(self._numbers.get(piece.parameter, -1), ()):
                low, high = max(stored.start, covered), min(stored.start + stored.count, end)
                if low >= high or low > covered:
                    continue
                run = Found(
                    file=file,
                    slab=slab,
                    source=stored.offset + low - stored.start,
                    target=piece.offset + low - piece.start,
                    count=high - low,
                )
                _append(found, run)
                covered = high
            if covered < end:
                raise LlmtopError(
                    f"the training state does not have all of {name_of(piece.parameter)}",
                    why=f"element {covered:,} is in none of its files",
                    fix="start from another checkpoint, or a new run",
                )
        return found

    def steps(self, pieces: Sequence[Piece]) -> set[float]:
        """What the optimizer counted for these parameters when the state was written."""
        numbers = {self._numbers.get(piece.parameter, -1) for piece in pieces}
        return {
            slab.step
            for number in numbers
            for _, _, slab in self._runs.get(number, ())
            if slab.step is not None
        }


def same_layout(pieces: Sequence[Piece], elements: int, found: Sequence[Found]) -> bool:
    """Whether a slab is element for element one that was stored."""
    if not found:
        return False
    slab = found[0].slab
    return (
        slab.whole
        and slab.elements == elements
        and all(one.slab is slab and one.source == one.target for one in found)
        and sum(piece.count for piece in slab.pieces) == sum(piece.count for piece in pieces)
    )


def _append(found: list[Found], run: Found) -> None:
    last = found[-1] if found else None
    if (
        last is not None
        and last.slab is run.slab
        and last.source + last.count == run.source
        and last.target + last.count == run.target
    ):
        found[-1] = Found(
            file=last.file,
            slab=last.slab,
            source=last.source,
            target=last.target,
            count=last.count + run.count,
        )
    else:
        found.append(run)

"""Packed token sequences in a fixed random order, sharded by rank, resumable from a plain position."""

from __future__ import annotations

from typing import Any

import numpy
import numpy.typing
from msgspec import Struct

from llmtop.presets.errors import UsageError
from llmtop.profiler.units import counted
from llmtop.trainer.worker.place import Place

Ids = numpy.typing.NDArray[Any]


class Position(Struct, frozen=True, kw_only=True):
    """How far the whole job has read: the same for every rank and world size."""

    epoch: int = 0
    index: int = 0
    """Sequences of this epoch's order that are used up."""


class SequenceOrder:
    """An endless deterministic order of sequences: each epoch a new shuffle of all of them."""

    def __init__(self, sequences: int, seed: int) -> None:
        self.sequences = sequences
        self._seed = seed
        self._epochs: dict[int, Ids] = {}

    def take(self, position: Position, count: int) -> Ids:
        """The sequence numbers of the next `count` places; an epoch's end is crossed without a gap."""
        taken: list[Ids] = []
        epoch, index = position.epoch, position.index
        while count > 0:
            part = self._permutation(epoch)[index : index + count]
            taken.append(part)
            count -= len(part)
            epoch, index = epoch + 1, 0
        return numpy.concatenate(taken)

    def advance(self, position: Position, count: int) -> Position:
        epochs, index = divmod(position.index + count, self.sequences)
        return Position(epoch=position.epoch + epochs, index=index)

    def _permutation(self, epoch: int) -> Ids:
        if epoch not in self._epochs:
            # Only the current epoch and the one that a step reaches into are kept.
            self._epochs = {e: order for e, order in self._epochs.items() if e >= epoch - 1}
            self._epochs[epoch] = numpy.random.default_rng([self._seed, epoch]).permutation(self.sequences)
        return self._epochs[epoch]


def _each(ranks: int) -> str:
    return "the rank" if ranks == 1 else f"each of {ranks} ranks"


class Batches:
    """This rank's micro-batches of packed sequences."""

    def __init__(
        self, tokens: Ids, *, seq_len: int, micro_batch: int, place: Place, seed: int, where: str
    ) -> None:
        sequences = len(tokens) // seq_len
        if sequences < place.world_size:
            raise UsageError(
                f"{where}: {counted(len(tokens), 'token')} {'is' if len(tokens) == 1 else 'are'} too few",
                why=f"{_each(place.world_size)} needs one sequence of {seq_len:,} tokens",
                fix="give more text, or a smaller --seq-len",
            )
        self.order = SequenceOrder(sequences, seed)
        self.position = Position()
        """Where the next micro-batch starts; set it to resume."""
        self._tokens = tokens
        self._seq_len = seq_len
        self._micro_batch = micro_batch
        self._place = place

    def next_micro_batch(self) -> Ids:
        """Token ids of shape (micro_batch, seq_len), 64-bit."""
        across_ranks = self._micro_batch * self._place.world_size
        first = self._place.rank * self._micro_batch
        numbers = self.order.take(self.position, across_ranks)[first : first + self._micro_batch]
        self.position = self.order.advance(self.position, across_ranks)
        starts = numbers.astype(numpy.int64) * self._seq_len
        rows = [self._tokens[start : start + self._seq_len] for start in starts]
        return numpy.stack(rows).astype(numpy.int64)

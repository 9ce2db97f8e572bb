"""Packed token sequences in a fixed random order, sharded by rank, resumable from a plain position."""

from __future__ import annotations

from typing import Any

import numpy
import numpy.typing
from msgspec.structs import replace

from llmtop.presets.errors import UsageError
from llmtop.profiler.units import counted
from llmtop.trainer.statefile import Position
from llmtop.trainer.worker.place import Place

Ids = numpy.typing.NDArray[Any]


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
        return taken[0] if len(taken) == 1 else numpy.concatenate(taken)

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
        self.micro_batch = micro_batch
        # Of a mapped file: each slice of the map itself would be a map again.
        self._tokens = numpy.asarray(tokens)
        self._seq_len = seq_len
        self._place = place
        self._seed = seed
        self._where = where

    @property
    def seq_len(self) -> int:
        return self._seq_len

    @property
    def marked_position(self) -> Position:
        """The position with what it counts, to be kept."""
        return replace(self.position, seq_len=self._seq_len)

    def resume(self, position: Position) -> None:
        """Go on from a kept position, whatever the length of sequences was then."""
        self.position = replace(position, seq_len=None)
        if position.seq_len is not None and position.seq_len != self._seq_len:
            self.position = self._converted(position.seq_len)

    def change_seq_len(self, seq_len: int) -> None:
        """Cut the text into sequences of another length from here on; raises UsageError if it is too short.

        The tokens are cut anew and shuffled anew, with the same seed. As large a share of the epoch counts as
        read as before: its length in tokens stays, but some of its text is read twice and some not at all.
        From the next epoch on each sequence is read once again.
        """
        old = self._seq_len
        changed = Batches(
            self._tokens,
            seq_len=seq_len,
            micro_batch=self.micro_batch,
            place=self._place,
            seed=self._seed,
            where=self._where,
        )
        self._seq_len, self.order = seq_len, changed.order
        self.position = self._converted(old)

    def _converted(self, old_seq_len: int) -> Position:
        """The position, whose index counts sequences of another length, in sequences of this one."""
        index = -(-self.position.index * old_seq_len // self._seq_len)
        return replace(self.position, index=min(index, self.order.sequences))

    def next_micro_batch(self) -> Ids:
        """Token ids of shape (micro_batch, seq_len), 64-bit."""
        across_ranks = self.micro_batch * self._place.world_size
        first = self._place.rank * self.micro_batch
        numbers = self.order.take(self.position, across_ranks)[first : first + self.micro_batch]
        self.position = self.order.advance(self.position, across_ranks)
        rows = self._tokens[: self.order.sequences * self._seq_len].reshape(-1, self._seq_len)
        return rows[numbers].astype(numpy.int64)

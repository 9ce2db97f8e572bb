"""What torch's data loaders take of a script's steps, apart from what else it does between two of them."""

from __future__ import annotations

import functools
import threading
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch.utils.data import dataloader

from llmtop.profiler.record.stepevents import BETWEEN

if TYPE_CHECKING:
    from llmtop.profiler.probes.script.watching import Watched

_TIMED = (("DataLoader", "__iter__"), ("_BaseDataLoaderIter", "__next__"))
"""Class and method of torch 2.x `utils/data/dataloader.py`: to start a pass, and to fetch a batch."""


class Fetches:
    """Times each batch that this thread takes of a `DataLoader`: two readings of the clock a batch.

    A loader of another library is not seen, nor one that a thread of the script's own reads ahead.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._thread = threading.get_ident()
        self._seconds: float | None = None
        """Since they were taken last; None until there was a batch."""
        self._inside = False
        """A data set may read another loader."""
        for kind, method in _TIMED:
            self._wrap(getattr(dataloader, kind, None), method)

    def take(self) -> float | None:
        """Seconds since the last call; None where no batch has come from a loader yet."""
        seconds = self._seconds
        if seconds is not None:
            self._seconds = 0.0
        return seconds

    def _wrap(self, kind: Any, method: str) -> None:
        own = getattr(kind, method, None)
        if own is None:
            return  # another torch: its loaders are not told apart, and the record says nothing of them

        @functools.wraps(own)
        def timed(loader: Any) -> Any:
            if self._inside or self._watched.off or threading.get_ident() != self._thread:
                return own(loader)
            self._inside = True
            began = perf_counter()
            try:
                return own(loader)
            finally:
                self._seconds = (self._seconds or 0.0) + perf_counter() - began
                self._inside = False

        setattr(kind, method, timed)
        self._watched.undo_with(lambda: setattr(kind, method, own))


def told_apart(phases: dict[str, float | None], fetch_seconds: float | None) -> dict[str, float | None]:
    """The phases of a step whose `data` is all that lay between two steps: now what loaders took of it alone,
    and `BETWEEN` for the remainder. On a GPU a fetch may be longer than the device waited for it."""
    outside = phases.get("data")
    if fetch_seconds is None or outside is None:
        return phases
    waited = min(outside, fetch_seconds)
    return {**phases, "data": waited, BETWEEN: outside - waited}

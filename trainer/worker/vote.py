"""Ranks ask one another, before each of DeepSpeed's collectives, whether all have come so far.

A rank that ran out of memory enters no further collective, and the others would wait in it for ever. With
the question asked first, they all leave the step at the same place instead. It is asked over the host (gloo),
so that no rank waits for its device, and only while a vote is open: about a tenth of a millisecond for each
collective.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed

_COLLECTIVES = (
    "all_reduce",
    "inference_all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "barrier",
)
"""Methods of deepspeed 0.19.8 `comm/torch.py:TorchBackend`, by which all of its collectives go."""


class PeerFailed(Exception):
    """Another rank has left the step."""

    def __init__(self) -> None:
        super().__init__("a peer could not finish the step: its memory ran out")


class Vote:
    """One for each process group; every rank makes it at the same place."""

    def __init__(self, world_size: int) -> None:
        self._group = torch.distributed.new_group(backend="gloo") if world_size > 1 else None
        self._open = False
        self._backend: Any = None

    def watch(self, backend: Any) -> None:
        """Ask before each collective of DeepSpeed's backend, while a vote is open."""
        self._backend = backend
        for name in _COLLECTIVES:
            setattr(backend, name, self._asking(getattr(backend, name)))

    def unwatch(self) -> None:
        """After the last step: the backend is as it was."""
        for name in _COLLECTIVES if self._backend is not None else ():
            delattr(self._backend, name)
        self._backend = None

    def open(self) -> None:
        self._open = True

    def close(self) -> None:
        """From here on nobody is asked."""
        self._open = False

    @property
    def is_open(self) -> bool:
        return self._open

    def all_well(self) -> None:
        """Collective: this rank has come so far. Raises PeerFailed on every rank where one has not."""
        if self._cast(failed=False):
            self.close()
            raise PeerFailed

    def fail(self) -> None:
        """Collective: this rank leaves the step; the others learn it where they next ask."""
        self.close()
        self._cast(failed=True)

    def _cast(self, *, failed: bool) -> bool:
        """Whether any rank has failed."""
        if self._group is None:
            return failed
        ballot = torch.tensor([int(failed)])
        torch.distributed.all_reduce(ballot, group=self._group)
        return bool(ballot.item())

    def _asking(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(collective)
        def asked(*arguments: Any, **options: Any) -> Any:
            if self._open:
                self.all_well()
            return collective(*arguments, **options)

        return asked

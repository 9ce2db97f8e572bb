"""What the system may have none of for a while: open files, processes, memory. No run ends for that."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


def is_scarcity(error: OSError) -> bool:
    """Whether the same may be had a little later."""
    return error.errno in _SCARCE


class Scarcity:
    """What only looks is left out where there is nothing to look with, and done again at the next turn."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._told = False

    @contextmanager
    def forgiven(self) -> Iterator[None]:
        """Raises every OSError that is something else."""
        try:
            yield
        except OSError as error:
            if not is_scarcity(error):
                raise
            if not self._told:
                self._told = True
                self._log(f"requests and samples wait: {error}")
        else:
            if self._told:
                self._told = False
                self._log("requests and samples go on")

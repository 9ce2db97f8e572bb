"""The way to the terminal: how long writes to it are held up, and how much less often to paint for that.

Over a slow link what is written waits until the link has taken what was written before. A view that comes
while that lasts makes the next one later still, and keys are answered behind all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from textual.driver import Driver

WINDOW_SECONDS = 2.0
"""Between two looks at the link."""
SLOW_SHARE, FREE_SHARE = 0.25, 0.05
"""Of the time that writes were held up: above the first it paints half as often, below the second twice."""
LARGEST_FACTOR = 16


class Link:
    """Told of each write by the thread that does it, and asked by the thread that reads the run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held_seconds = 0.0
        self._writing_since: float | None = None
        self._looked_at, self._held_then = clock(), 0.0
        self._factor = 1

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._lock:
            self._writing_since = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._held_seconds, self._writing_since = self._held(), None

    @property
    def factor(self) -> int:
        """How many times longer than usual to wait between two paintings; 1: the link takes all at once."""
        with self._lock:
            seconds = self._clock() - self._looked_at
            if seconds >= WINDOW_SECONDS:
                share = (self._held() - self._held_then) / seconds
                self._looked_at, self._held_then = self._clock(), self._held()
                if share > SLOW_SHARE:
                    self._factor = min(2 * self._factor, LARGEST_FACTOR)
                elif share < FREE_SHARE:
                    self._factor = max(1, self._factor // 2)
            return self._factor

    def _held(self) -> float:
        """With what the write under way has waited so far."""
        since = self._writing_since
        return self._held_seconds + (self._clock() - since if since is not None else 0.0)


class MeasuredFile:
    """A terminal's stream whose writes are told to a link; all else is the stream's own."""

    def __init__(self, plain: IO[str], link: Link) -> None:
        self._plain, self._link = plain, link

    def write(self, text: str) -> int:
        with self._link.writing():
            return self._plain.write(text)

    def flush(self) -> None:
        with self._link.writing():
            self._plain.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def measured(kind: type[Driver], link: Link) -> type[Driver]:
    """A driver of Textual's that tells the link of its writes; one that writes elsewhere stays as it is."""

    class MeasuredDriver(kind):  # type: ignore[valid-type,misc]  # the kind is known when the app starts
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            plain: IO[str] | None = getattr(self, "_file", None)
            if plain is not None:
                self._file = MeasuredFile(plain, link)

    return MeasuredDriver

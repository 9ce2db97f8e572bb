"""Signals that end a search: raised where it can be left, kept waiting where something is half begun."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it the first of `SIGNALS` raises KeyboardInterrupt, and later ones do nothing.

    What is then to be ended (a trial's run) is so in bounded time. A signal that is ignored already stays
    so: `nohup` means it.
    """
    came: list[int] = []

    def raise_once(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1:
            raise KeyboardInterrupt

    with _handled(raise_once):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Within it `SIGNALS` wait; the first one is sent again at its end."""
    came: list[int] = []
    try:
        with _handled(lambda number, _frame: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def _handled(handler: signal._HANDLER) -> Iterator[None]:
    """Signals go to the main thread: elsewhere there is nothing to do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    known = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: own for number, own in known.items() if own not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)

"""Questions to whoever may never answer: a driver hangs in a call that no signal interrupts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

WAIT_SECONDS = 2.0
"""Reading all GPUs of a host takes some milliseconds; a driver that resets one may take longer."""
OPEN_SECONDS = 30.0
"""Where nobody else uses the driver and it is not kept loaded, to open it takes seconds for each GPU."""
_T = TypeVar("_T")


class Aside:
    """Asks one thing at a time, in a thread of its own that ends with the process."""

    def __init__(self, wait_seconds: float = WAIT_SECONDS) -> None:
        self._wait_seconds = wait_seconds
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._free = threading.Event()
        self._free.set()
        self._thread: threading.Thread | None = None

    @property
    def waits(self) -> bool:
        """Whether what was asked before has not been answered yet."""
        return not self._free.is_set()

    def close(self) -> None:
        """Nothing more is asked: the thread ends, with the answer that it waits for."""
        if self._thread is not None:
            self._asked.put(None)
            if not self.waits:
                self._thread.join()

    def ask(self, question: Callable[[], _T], unanswered: _T, *, wait_seconds: float | None = None) -> _T:
        """The answer, or `unanswered` where none comes in time, or an earlier one has not come yet.

        Raises what the question raises; an answer that comes too late is for nobody. `wait_seconds` for one
        that may take longer than the others.
        """
        if self.waits:
            return unanswered
        answers: list[_T] = []
        problems: list[Exception] = []

        def answer() -> None:
            try:
                answers.append(question())
            except Exception as error:  # noqa: BLE001 - raised again where it was asked
                problems.append(error)
            finally:
                self._free.set()

        self._free.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="llmtop-driver", daemon=True)
            self._thread.start()
        self._asked.put(answer)
        if not self._free.wait(self._wait_seconds if wait_seconds is None else wait_seconds):
            return unanswered
        if problems:
            raise problems[0]
        return answers[0]

    def _work(self) -> None:
        while (question := self._asked.get()) is not None:
            question()


class OneQuestion:
    """Asks what several threads of a process may ask, such as to open a driver: one at a time.

    While one has no answer yet, another is unanswered at once: no thread more waits for a driver that hangs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hung: Aside | None = None

    def ask(self, question: Callable[[], _T], unanswered: _T, wait_seconds: float) -> _T:
        """As `ask_once`; nobody waits longer than for the question before and for this one."""
        with self._lock:
            if self._hung is not None and self._hung.waits:
                return unanswered
            aside = self._hung = Aside(wait_seconds)
            try:
                return aside.ask(question, unanswered)
            finally:
                aside.close()


def ask_once(question: Callable[[], _T], unanswered: _T, wait_seconds: float = OPEN_SECONDS) -> _T:
    """One question, after which no thread is left, unless it was not answered. Raises what it raises."""
    return OneQuestion().ask(question, unanswered, wait_seconds)

"""The most memory that this process holds of its own, without the pages of files that it reads."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

_EVERY_SECONDS = 0.02


class Peak:
    """Looks at the kernel's count now and then, between entering and leaving; None where it has none."""

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory peak", daemon=True)

    def __enter__(self) -> Peak:
        self.bytes = anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._take()

    def _look(self) -> None:
        while not self._over.wait(_EVERY_SECONDS):
            self._take()

    def _take(self) -> None:
        now = anonymous_bytes()
        if now is not None:
            self.bytes = max(now, self.bytes or 0)


def anonymous_bytes(pid: int | str = "self") -> int | None:
    """`RssAnon` of Linux; None elsewhere, and of a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("RssAnon:")), None)
    return None if found is None else int(found.split()[1]) * 1024

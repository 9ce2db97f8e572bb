"""A command of llmtop in a process of its own, which outlives the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


def start_apart(
    words: Sequence[str], log_path: Path, variables: Mapping[str, str] | None = None
) -> threading.Thread:
    """Start `llmtop WORDS` with its output behind what the log has. Raises OSError where that cannot be.

    `variables` are added to its environment: what stands there only its owner can read, and all can read its
    words. The thread waits for it: whoever starts it may live for long, and it must not stay as a zombie.
    """
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llmtop.tui.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **(variables or {})},
        )
    reaper = threading.Thread(target=process.wait, name=f"reaper of {process.pid}", daemon=True)
    reaper.start()
    return reaper

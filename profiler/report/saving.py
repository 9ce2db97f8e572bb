"""Puts a page where somebody wants it."""

from __future__ import annotations

from pathlib import Path

from llmtop.presets.errors import UsageError
from llmtop.profiler.record.unwritable import unwritable
from llmtop.profiler.record.wholefile import SHARED_MODE, write_atomic


def save_page(path: Path, page: str) -> None:
    """Whole or not at all; raises LlmtopError where it cannot be."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", fix=f"name a file in it: {path / 'report.html'}")
    try:
        # Without secrets and made to be shown around: the umask says to whom, as for an archive.
        write_atomic(path.absolute(), page.encode("utf-8", "replace"), mode=SHARED_MODE)
    except OSError as error:
        raise unwritable(path, error, "name another place") from error

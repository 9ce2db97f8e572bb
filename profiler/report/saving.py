"""Puts a page where somebody wants it."""

from __future__ import annotations

from pathlib import Path

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.record.wholefile import write_atomic


def save_page(path: Path, page: str) -> None:
    """Whole or not at all; raises LlmtopError where it cannot be."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", fix=f"name a file in it: {path / 'report.html'}")
    try:
        write_atomic(path.absolute(), page.encode("utf-8", "replace"))
    except OSError as error:
        raise LlmtopError(
            f"{path} cannot be written",
            why=error.strerror or str(error),
            fix="free some space there, or name another place",
        ) from error

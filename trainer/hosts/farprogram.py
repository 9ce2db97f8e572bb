"""The program that a link sends to its far end: the modules of it, as one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_MODULES = ("farfolder", "farruns", "remote")
"""The first one says how annotations are read, the last one begins to work."""
_BETWEEN_THEM = ("from llmtop.", "from __future__ ")


@cache
def far_program() -> bytes:
    """Its source, which is sent ahead of everything else."""
    here = Path(__file__).parent
    first, *others = ((here / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES)
    lines = [line for text in others for line in text.splitlines() if not line.startswith(_BETWEEN_THEM)]
    return "\n".join([first, *lines, ""]).encode()

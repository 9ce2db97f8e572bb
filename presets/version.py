"""Which llmtop this is."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "llmtop-deepspeed"


def llmtop_version() -> str:
    """The installed distribution's version; `source` where the code runs straight from a checkout."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "source"

"""Paths as people write them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from llmtop.presets.errors import nearest

_HUB_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"


def expand_user(text: str) -> str:
    """The text with `~` filled in. A `~name` that is no user stays as it is, to be told as a missing file.

    `Path.expanduser` raises for such a name, and `Path` itself turns an empty text into the current folder.
    """
    return os.path.expanduser(text)  # noqa: PTH111


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; also of what no path can be, for which `Path.is_dir` raises."""
    return os.path.isdir(path)  # noqa: PTH112


def is_file(path: Path) -> bool:
    """The same of a regular file."""
    return os.path.isfile(path)  # noqa: PTH113


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where llmtop's own caches lie, whether there are any or not: `$XDG_CACHE_HOME/llmtop`.

    The XDG rules say to ignore a relative path.
    """
    configured = Path(environment.get("XDG_CACHE_HOME", ""))
    home = Path(environment.get("HOME") or Path.home())
    return (configured if configured.is_absolute() else home / ".cache") / "llmtop"


def is_hub_id(text: str) -> bool:
    """Whether it is written like a model's name on the Hugging Face Hub, and nothing here has that name."""
    named_so = re.fullmatch(_HUB_ID, text) is not None and not text.endswith(".json")
    return named_so and not os.path.exists(text)  # noqa: PTH110


def nearest_sibling(path: Path) -> Path | None:
    """What `path`, which does not exist, was likely meant to be: endings alike say nothing, names do."""
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return None
    alike = [name for name in names if Path(name).suffix == path.suffix]
    for known in (alike, names):
        stems = {Path(name).stem: name for name in known}
        guess = nearest(path.stem, stems)
        if guess is not None:
            return path.parent / stems[guess]
    return None

"""Where presets lie, and which there are: the user's own before the built-in ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Kind = Literal["models", "gpus", "recipes"]

BUILT_IN = Path(__file__).resolve().parent
"""The folder of the presets that come with the program."""
_LONGEST_NAME = 100


def user_presets_dir() -> Path:
    """Where a person's own presets lie, whether it exists or not."""
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG rules say to ignore a relative path.
    root = Path(configured) if Path(configured).is_absolute() else Path.home() / ".config"
    return root / "llmtop" / "presets"


def _folders(kind: Kind) -> tuple[Path, Path]:
    return user_presets_dir() / kind, BUILT_IN / kind


def preset_names(kind: Kind) -> list[str]:
    """Of every file there is, also of one whose name no preset can have."""
    return sorted({path.stem for folder in _folders(kind) for path in folder.glob("*.toml")})


def is_name(text: str) -> bool:
    """Letters, digits and, behind the first, `.`, `_` and `-`; a pattern would take longer to compile."""
    is_short = 0 < len(text) <= _LONGEST_NAME and text.isascii() and text[0].isalnum()
    return is_short and all(letter.isalnum() or letter in "._-" for letter in text)


def find(kind: Kind, name: str) -> Path | None:
    """The file of a preset, whose name may be written in capitals; None where there is none."""
    if not is_name(name):
        return None
    for folder in _folders(kind):
        for spelling in dict.fromkeys((name, name.lower())):
            path = folder / f"{spelling}.toml"
            if path.is_file():
                return path
    return None


def has(kind: Kind, name: str) -> bool:
    """Whether there is a preset of this name."""
    return find(kind, name) is not None

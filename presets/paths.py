"""Paths as people write them."""

from __future__ import annotations

import os


def expand_user(text: str) -> str:
    """The text with `~` filled in. A `~name` that is no user stays as it is, to be told as a missing file.

    `Path.expanduser` raises for such a name, and `Path` itself turns an empty text into the current folder.
    """
    return os.path.expanduser(text)  # noqa: PTH111

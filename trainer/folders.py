"""Whether a folder can be written, found out by writing."""

from __future__ import annotations

import tempfile
from pathlib import Path

from llmtop.presets.errors import UsageError
from llmtop.profiler.hardware.disk import existing
from llmtop.profiler.record.unwritable import require_folder

_TRIAL_BYTES = 1 << 16
"""A full disk takes an empty file without a word."""


def check_place(out: Path, elsewhere: str) -> None:
    """Raise UsageError where the folder that `out` shall lie in is not there or cannot be written.

    `elsewhere` says how another place is named.
    """
    require_folder(out)
    why = why_not_writable(out.absolute().parent)
    if why:
        raise UsageError(f"cannot write {out}", why=why, fix=elsewhere)


def why_not_writable(folder: Path) -> str | None:
    """The reason, for the folder itself or the nearest one above it that exists; None when it can be written.

    Trying tells more than permissions do: a file system may be full, read-only or not a real one.
    """
    place = existing(folder)
    links = (path for path in (folder, *folder.parents) if path.is_symlink())
    broken = next((link for link in links if not link.exists()), None)
    if broken is not None:
        return f"{broken} is a link to {broken.readlink()}, which does not exist"
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as trial:
            trial.write(bytes(_TRIAL_BYTES))
    except OSError as error:
        return f"a file in {place}: {error.strerror or error}"
    return None

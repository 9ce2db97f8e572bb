"""Output that is made aside, and gets its name when all of it is there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtop.presets.errors import UsageError
from llmtop.profiler.record.holding import hold
from llmtop.profiler.record.wholefile import sync_file


def partial_folder(out: Path) -> Path:
    """Where it lies until then."""
    return out.absolute().parent / f".{out.absolute().name}.partial"


@contextmanager
def held_partial(out: Path) -> Iterator[Path]:
    """That folder, empty, for as long as this lasts; whoever asks moves it, or what is in it, or removes it.

    Raises UsageError where another llmtop has it, OSError where it cannot be made.
    """
    folder = partial_folder(out)
    folder.mkdir(exist_ok=True)
    with hold(folder, lambda: _taken(out)):
        _empty(folder)
        yield folder


def sync_all(made: Path) -> None:
    """Make a file, or a folder with all that is in it, last through a power cut."""
    for path in (made, *made.rglob("*")) if made.is_dir() else (made,):
        sync_file(path)


def _taken(out: Path) -> UsageError:
    return UsageError(
        f"{out} is being written already",
        why="another llmtop does it now",
        fix="wait for that, or name another",
    )


def _empty(folder: Path) -> None:
    """Remove what an earlier one left that was killed."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

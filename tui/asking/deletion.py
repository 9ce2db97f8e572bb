"""Deleting a run: what goes with its folder, and why it may not. Never a run of which something is alive."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from msgspec import Struct

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.fold.runstate import ENDED
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.units import format_bytes
from llmtop.trainer.change.restagefolder import remove_states
from llmtop.tui.commands.stop import processes_left


class Load(Struct, frozen=True, kw_only=True):
    """What lies in a run's folder."""

    size_bytes: int = 0
    files: int = 0
    checkpoint_bytes: int = 0

    def in_words(self) -> str:
        files = "1 file" if self.files == 1 else f"{self.files:,} files"
        saved = (
            f", {format_bytes(self.checkpoint_bytes)} of them checkpoints" if self.checkpoint_bytes else ""
        )
        return f"{format_bytes(self.size_bytes)} in {files}{saved}"


def weigh(run: RunDir) -> Load:
    """What deleting the run would take away; links are counted and not followed."""
    size = files = saved = 0
    seen: set[tuple[int, int]] = set()
    for folder, _, names in os.walk(run.path):
        in_checkpoints = Path(folder).is_relative_to(run.checkpoints_dir)
        for name in names:
            try:
                found = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - a checkpoint has many files
            except OSError:
                continue  # it went while we counted
            if (found.st_dev, found.st_ino) in seen:
                continue
            seen.add((found.st_dev, found.st_ino))
            size, files = size + found.st_size, files + 1
            saved += found.st_size if in_checkpoints else 0
    return Load(size_bytes=size, files=files, checkpoint_bytes=saved)


def require_deletable(run: RunDir) -> None:
    """Raise LlmtopError where the run goes on, or where something of it is still alive."""
    if run.path.is_symlink():
        raise LlmtopError(f"{run.path} is a link", fix="remove the link and what it leads to by hand")
    if read_state(run).status not in ENDED:
        raise LlmtopError(
            f"run {run.run_id} goes on",
            why="only a run that has ended is deleted",
            fix=f"llmtop stop {run.run_id}",
        )
    left = processes_left(run)
    if left:
        raise LlmtopError(
            f"processes of run {run.run_id} are left: {', '.join(map(str, left))}",
            fix=f"llmtop stop {run.run_id} ends them",
        )


def delete(run: RunDir) -> Load:
    """Delete a run's folder for good; what went. It leaves the list at once, whatever comes after."""
    require_deletable(run)
    load = weigh(run)
    # A supervisor that was killed in a relaunch may have left a state in memory, found by the run's path.
    remove_states(run)
    aside = run.path.with_name(f".{run.run_id}.{secrets.token_hex(3)}.deleted")
    try:
        run.path.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise LlmtopError(
            f"cannot delete {run.path}",
            why=error.strerror or str(error),
            fix=f"remove what is left by hand: {aside if aside.exists() else run.path}",
        ) from error
    return load

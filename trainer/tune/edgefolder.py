"""Where the trials of `tune --max-batch` and `--max-length` are: a folder that the next question clears."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.record.holding import hold
from llmtop.profiler.record.rundir import list_runs
from llmtop.trainer.tune.trial import end_run


@contextmanager
def edge_folder(root: Path) -> Iterator[Path]:
    """The folder, empty and held: two of them at a time would measure each other.

    What an earlier question has left, a run that outlived its kill included, is ended and removed. Raises
    LlmtopError.
    """
    taken = UsageError(
        "another search for the largest that fits is going on",
        why=f"another process holds {root}",
        fix="wait for its end, or interrupt it",
    )
    with ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            stack.enter_context(hold(root, lambda: taken))
            for run in list_runs(root):
                end_run(run)
            for left in root.iterdir():
                if left.is_dir():
                    shutil.rmtree(left)
                else:
                    left.unlink()
        except OSError as error:
            raise LlmtopError(
                f"the trials cannot be kept in {root}",
                why=f"{error.filename or root}: {error.strerror or error}",
                fix="make the folder writable, free some space, or set LLMTOP_RUNS_DIR to another folder",
            ) from error
        yield root

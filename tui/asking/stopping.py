"""What a person is told who asks a run to stop."""

from __future__ import annotations

from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.supervisor.patience import Graces


def at_the_latest(run: RunDir) -> str:
    """How long a run may take to stop without saving, which waits for no longer step; empty for a command of
    the user's own, which may save."""
    if run.spec().script is not None:
        return ""
    graces = Graces.from_environment()
    return f", after {graces.stop + graces.stop_kill:g} s at the latest"


def stop_words(run: RunDir) -> str:
    """What a request to stop does, without saving: to be said of the run."""
    script = run.spec().script
    if script is None:
        return "ends after the step that it is in"
    if script.pid is not None:
        return "is looked at no more, and its process goes on"
    return "is sent SIGTERM"

"""Searches that nobody sits at: started in a session of their own, and asked to end by a signal."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.logend import end_lines
from llmtop.trainer.preflight import preflight
from llmtop.trainer.tune.journal import Asked, TuneDir, list_tunes
from llmtop.trainer.tune.trial import trial_spec
from llmtop.tui.apart import start_apart


def search_for(spec: RunSpec, root: Path) -> TuneDir | None:
    """The newest search that began with this setting."""
    for tune in list_tunes(root):
        with suppress(LlmtopError):  # one of another version is none that can go on
            asked = tune.asked()
            if (asked.spec.options, asked.spec.model, asked.spec.gpu) == (spec.options, spec.model, spec.gpu):
                return tune
    return None


def begin(spec: RunSpec, root: Path) -> TuneDir:
    """A new search from this setting, with nothing fixed. Raises LlmtopError for one that cannot run here."""
    preflight(trial_spec(spec))
    tune = TuneDir.create(root, Asked(spec=spec))
    go_on(tune)
    return tune


def go_on(tune: TuneDir) -> None:
    """What `llmtop tune --resume` does, its words in the search's own log."""
    asked = tune.asked()
    trials = len(tune.ended()) + asked.trials if len(tune.ended()) >= asked.trials else asked.trials
    try:
        start_apart(["tune", "--resume", str(tune.path.resolve()), "--trials", str(trials)], tune.log_path)
    except OSError as error:
        raise LlmtopError(
            f"search {tune.tune_id} cannot be started",
            why=error.strerror or str(error),
            fix=f"free some space; then: llmtop tune --resume {tune.tune_id}",
        ) from error


def interrupt(tune: TuneDir) -> bool:
    """Ask the process that is at it to end, its trial with it; whether there was one."""
    holder = tune.holder()
    if holder is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(holder.pid, signal.SIGTERM)
    return True


def last_words(tune: TuneDir) -> str:
    """The end of what it wrote, for a search that went away without a trial."""
    lines = end_lines(tune.log_path)
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or [""])[-1]

"""What to do about a run that ran out of memory: the changes that fit, each with its command."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.events import RankFailed
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.restagefolder import restage_folders
from llmtop.trainer.statefile import newest_in
from llmtop.trainer.supervisor.postmortem import SMALLER

if TYPE_CHECKING:
    from llmtop.profiler.oom.fixes import Fix

_SAID = 2
"""Of the fixes; `llmtop report` has the others."""


class MemoryFixes:
    """In words, for the setting in force; a folder that cannot be read does not keep a run from its end."""

    def __init__(self, run: RunDir, log: Callable[[str], None]) -> None:
        self._run = run
        self._log = log

    def device(self, failure: RankFailed | None) -> str:
        """`failure` is of the rank at fault; None where it could not tell."""
        return self._unless_unreadable(lambda: memory_fix(self._run, failure), SMALLER)

    def host(self, failure: RankFailed | None) -> str:
        """Empty where no change of the run spares the host's memory."""
        if self._run.spec().on_cpu:
            return self.device(failure)
        return self._unless_unreadable(lambda: _host_fix(self._run), "")

    def _unless_unreadable(self, fix: Callable[[], str], otherwise: str) -> str:
        try:
            return fix()
        except LlmtopError as error:
            self._log(f"nothing can be suggested: {error}")
            return otherwise


def memory_fix(run: RunDir, failure: RankFailed | None) -> str:
    """Where the device's memory ran out, or on the CPU kind the ranks' own."""
    # The prediction is a tenth of a second of imports, which few runs need.
    from llmtop.profiler.oom.fixes import fixes, room_of
    from llmtop.profiler.oom.words import nothing_fits

    spec, prediction = run.spec(), run.prediction()
    room = room_of(spec, failure.shortage if failure is not None else None)
    every = fixes(spec, prediction, room, _resume(run))
    return _in_words(run, every) or nothing_fits(prediction, room)


def _host_fix(run: RunDir) -> str:
    from llmtop.profiler.oom.fixes import host_fixes

    return _in_words(run, host_fixes(run.spec(), _resume(run)))


def _resume(run: RunDir) -> str:
    return f"llmtop resume {run.run_id}"


def _in_words(run: RunDir, every: tuple[Fix, ...]) -> str:
    found = [fix for fix in every if fix.command]
    if not found:
        # What is left needs a run of its own.
        return "; or ".join(fix.text for fix in every[:_SAID])
    saved = newest_in((run.checkpoints_dir, *restage_folders(run)))
    then = "begins the run anew" if saved is None else f"goes on after step {saved[0].step:,}"
    anew = " --anew" if saved is None else ""
    words = "; or ".join(f"{fix.text}: {fix.command}{anew}" for fix in found[:_SAID])
    return f"{words}. It {then}"

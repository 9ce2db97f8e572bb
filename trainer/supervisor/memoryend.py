"""What to do about a run that ran out of device memory: the changes that fit, each with its command."""

from __future__ import annotations

from llmtop.profiler.record.events import RankFailed
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.restagefolder import restage_folders
from llmtop.trainer.statefile import newest_in

_SAID = 2
"""Of the fixes; `llmtop report` has the others."""


def memory_fix(run: RunDir, failure: RankFailed | None) -> str:
    """For the setting in force. `failure` is of the rank at fault; None where it could not tell."""
    # The prediction is a tenth of a second of imports, which few runs need.
    from llmtop.profiler.oom.fixes import fixes, room_of
    from llmtop.profiler.oom.words import nothing_fits

    spec, prediction = run.spec(), run.prediction()
    room = room_of(spec, failure.shortage if failure is not None else None)
    every = fixes(spec, prediction, room, run.run_id)
    found = [fix for fix in every if fix.command]
    if not found:
        # What is left needs a run of its own.
        return "; or ".join(fix.text for fix in every[:_SAID]) or nothing_fits(prediction, room)
    saved = newest_in((run.checkpoints_dir, *restage_folders(run)))
    then = "begins the run anew" if saved is None else f"goes on after step {saved[0].step:,}"
    words = "; or ".join(f"{fix.text}: {fix.command}" for fix in found[:_SAID])
    return f"{words}. It {then}"

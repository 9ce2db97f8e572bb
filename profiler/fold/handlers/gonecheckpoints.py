"""Checkpoints of a run that went on from an earlier one: those after it were not there any more."""

from __future__ import annotations

from llmtop.profiler.fold.batch import Batch


def forget_what_is_gone(batch: Batch) -> None:
    """Of what its processes before had saved nothing after the step that it was gone on with from counts.

    Nor does a refusal that one of those had made up for. Nothing changes where nobody has told the step.
    """
    state = batch.state
    if state.went_on is None:
        return
    step = state.goes_on_after
    if step is None:
        loaded = batch.rank(state.first_rank).checkpoint_loaded
        if loaded is None:
            return
        step = loaded.step
    there = tuple(one for one in state.checkpoints if one.step <= step or not state.is_of_before(one.t))
    if len(there) < len(state.checkpoints):
        gone = [one for one in state.checkpoints if one not in there]
        made_up = max(one.t for one in gone)
        refused = tuple(one for one in state.checkpoints_refused if one.step <= step or one.t > made_up)
        batch.set(checkpoints=there, checkpoints_refused=refused)
    last = state.last_saved
    if last is not None and last.step > step and state.is_of_before(last.t):
        batch.set(last_saved=there[-1] if there else None)

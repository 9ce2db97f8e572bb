"""A change that whoever asked for it has refused is recorded, and never made."""

from __future__ import annotations

from pathlib import Path

import msgspec

from llmtop.profiler.record.changeevents import ChangeRefused
from llmtop.profiler.record.events import AnyEvent
from llmtop.trainer import control
from llmtop.trainer.supervisor.changes import Changes
from llmtop.trainer.supervisor.progress import Progress
from llmtop.trainer.supervisor.ranks import Ranks
from tests.recorded import make_recorded_run


def test_a_change_that_was_refused_where_it_was_asked_for_is_not_made(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path)
    written: list[AnyEvent] = []
    answers: list[tuple[str, str]] = []
    changes = Changes(
        run,
        Ranks(),
        lambda setting: None,
        written.append,
        lambda asked, answer, reason: answers.append((answer, reason)),
        lambda line: None,
    )
    # The run as it is now could take it.
    params = control.SetParams(words=("learning_rate=0.5",), refusal="it did not fit", refusal_fix="less")
    request = control.Request(request_id="1", action=control.SET, params=msgspec.to_builtins(params))
    changes.take(request, Progress(run, run.spec().world_size))
    assert answers == [("refused", "it did not fit")]
    assert written == [ChangeRefused(request_id="1", asked=params.words, reason="it did not fit", fix="less")]
    assert not changes.under_way and run.in_force().setting == 0

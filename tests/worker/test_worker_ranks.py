"""Whole ranks as a supervisor starts them: stages, stopping together, going on, and failing."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from llmtop.presets.errors import ExitCode
from llmtop.profiler.record.checkpointevents import CheckpointSaved
from llmtop.profiler.record.events import (
    BaselineMeasured,
    MemoryClassified,
    RankFailed,
    RankFinished,
    StageBegan,
    StageFinished,
    StepFinished,
)
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.statefile import newest
from tests.worker.launching import (
    events_of,
    log_end,
    make_run,
    run_ranks,
    start_ranks,
    tiny_spec,
    wait_for_ranks,
)
from tests.worker.signalled_rank import SIGNALLED_STEP

pytestmark = pytest.mark.slow

STEPS = 150
STAGES = ["import", "process_group", "data", "model", "partition", "first_step"]
MIB = 1 << 20


def losses(run: RunDir) -> dict[int, float | None]:
    return {event.step: event.loss for event in events_of(run, 0, StepFinished)}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two ranks that train to the end."""
    spec = tiny_spec(gpus=2, steps=STEPS, lr_schedule="cosine", warmup_steps=9)
    run = make_run(tmp_path_factory.mktemp("straight"), spec)
    assert run_ranks(run, forked=False) == [0, 0], log_end(run, 0) + log_end(run, 1)
    return run


def test_the_stages_of_start_up_come_in_order(straight: RunDir) -> None:
    for rank in (0, 1):
        assert [event.stage for event in events_of(straight, rank, StageBegan)] == STAGES
        finished = events_of(straight, rank, StageFinished)
        assert [event.stage for event in finished] == STAGES
        assert all(event.seconds > 0 for event in finished)


def test_the_loss_falls_on_real_text(straight: RunDir) -> None:
    seen = losses(straight)
    assert list(seen) == list(range(1, STEPS + 1))
    first, last = seen[1], seen[STEPS]
    assert first is not None and last is not None
    assert last < 0.9 * first


def test_the_learning_rate_of_a_step_is_the_one_that_it_used(straight: RunDir) -> None:
    rates = [event.learning_rate for event in events_of(straight, 0, StepFinished)]
    assert rates[0] == pytest.approx(1e-3 / 9)
    assert rates[9] == pytest.approx(1e-3)
    assert rates[-1] is not None and 0 < rates[-1] < 1e-5


def test_the_process_is_the_runtime_and_what_was_classified(straight: RunDir) -> None:
    """Tensors and runtime explain the resident set but for what math and data libraries take in use."""
    for rank in (0, 1):
        baseline = events_of(straight, rank, BaselineMeasured)[0].rss_bytes
        assert baseline is not None
        last = events_of(straight, rank, MemoryClassified)[-1]
        assert last.total_bytes is not None
        unexplained = last.total_bytes - baseline - sum(last.components.values())
        assert abs(unexplained) < 24 * MIB
        finished = events_of(straight, rank, RankFinished)[0]
        assert finished.peak_rss_bytes is not None
        assert finished.peak_rss_bytes < baseline + 48 * MIB


def test_a_signal_to_one_rank_stops_all_and_a_relaunch_goes_on_exactly(
    straight: RunDir, tmp_path: Path
) -> None:
    run = make_run(tmp_path, straight.spec())
    script = Path(__file__).with_name("signalled_rank.py")
    processes = start_ranks(run, [sys.executable, str(script), str(run.path)])
    assert wait_for_ranks(processes) == [0, 0], log_end(run, 0) + log_end(run, 1)
    ends = [events_of(run, rank, RankFinished)[0] for rank in (0, 1)]
    stopped_at = ends[0].last_step
    assert [(end.reason, end.last_step) for end in ends] == [("stopped", stopped_at)] * 2
    assert stopped_at == SIGNALLED_STEP + 1, "what the ranks agree on at the end of the next step"
    saved = events_of(run, 0, CheckpointSaved)
    assert [event.step for event in saved] == [stopped_at]
    assert Path(saved[0].path).is_dir() and saved[0].size_bytes > 12 * 123_200
    progress = newest(run.checkpoints_dir)
    assert progress is not None and progress.step == stopped_at

    assert run_ranks(run) == [0, 0], log_end(run, 0) + log_end(run, 1)
    resumed, expected = losses(run), losses(straight)
    assert list(resumed) == list(range(1, STEPS + 1))
    assert [resumed[step] for step in sorted(resumed)] == pytest.approx(
        [expected[step] for step in sorted(expected)], abs=1e-5
    )
    rates = [[event.learning_rate for event in events_of(one, 0, StepFinished)] for one in (run, straight)]
    assert rates[0] == pytest.approx(rates[1])


def test_only_so_many_checkpoints_stay_and_the_one_that_was_gone_on_from(tmp_path: Path) -> None:
    spec = tiny_spec(steps=4, checkpoint_every=1, keep_checkpoints=2)
    run = make_run(tmp_path, spec)
    assert run_ranks(run) == [0], log_end(run, 0)
    assert [event.step for event in events_of(run, 0, CheckpointSaved)] == [1, 2, 3, 4]
    assert sorted(path.name for path in run.checkpoints_dir.iterdir()) == ["step-3", "step-4"]
    # A start that goes on from the older one, and then makes more than it keeps.
    shutil.rmtree(run.checkpoints_dir / "step-4")
    longer = msgspec.structs.replace(spec.options, steps=7)
    run.spec_path.write_bytes(msgspec.json.encode(msgspec.structs.replace(spec, options=longer)))
    run = RunDir.open(run.path)
    assert run_ranks(run) == [0], log_end(run, 0)
    assert sorted(path.name for path in run.checkpoints_dir.iterdir()) == ["step-3", "step-6", "step-7"]


def test_wrong_data_ends_the_rank_with_words_and_no_traceback(tmp_path: Path) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text('{"text": "ok"}\n{"text": oops}\n')
    run = make_run(tmp_path / "run", tiny_spec(data=str(data)))
    assert run_ranks(run) == [ExitCode.USAGE]
    failed = events_of(run, 0, RankFailed)[0]
    assert failed.stage == "data" and not failed.out_of_memory
    assert "bad.jsonl, line 2" in failed.message
    assert failed.traceback == ""
    assert "bad.jsonl, line 2" in log_end(run, 0)
    assert "Traceback" not in log_end(run, 0)
    assert not events_of(run, 0, RankFinished)

"""Host memory that fills up under a real run: the ranks save before it is full, once, and go on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtop.profiler.findings.find import findings
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.failureevents import HostMemoryRunsOut
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.trainer import control
from llmtop.trainer.dsconfig import deepspeed_config
from llmtop.trainer.statefile import newest
from tests.worker.launching import log_end, tiny_spec

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS = 240.0


@pytest.fixture
def filling(tmp_path: Path) -> Iterator[RunDir]:
    """A run of two ranks whose cgroup is full a minute after its first step, as its supervisor reads it."""
    spec = tiny_spec(gpus=2, zero=2, steps=100_000, threads_per_rank=1, sample_seconds=0.05)
    run = RunDir.create(tmp_path / "runs", spec, predict(spec), deepspeed_config(spec))
    script = Path(__file__).with_name("filling_supervisor.py")
    with run.log_path(SUPERVISOR).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), str(run.path), "60"], stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield run
    finally:
        process.terminate()
        process.wait(TIMEOUT_SECONDS)


def test_the_ranks_save_before_the_kernel_would_kill_one(filling: RunDir) -> None:
    run = filling
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (state := read_state(run)).checkpoints:
        assert time.monotonic() < deadline, (run.log_path(SUPERVISOR).read_text(), log_end(run, 0))
        time.sleep(0.05)
    (told,) = [e for e in EventTail(run.events_path(SUPERVISOR)).poll() if isinstance(e, HostMemoryRunsOut)]
    assert (told.action, told.limit) == ("save_asked", "cgroup") and 0 < told.seconds < 60
    saved = state.checkpoints[0]
    assert newest(run.checkpoints_dir) is not None
    # The training goes on, and is not asked again.
    while read_state(run).steps_finished < saved.step + 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    state = read_state(run)
    assert len(state.checkpoints) == 1 and state.status == "running"
    grows = [f for f in findings(state, run.spec(), run.prediction()) if f.key == "host_memory_grows"]
    assert all(f"a checkpoint was made of step {saved.step:,}" in f.evidence for f in grows)
    control.stop(run, save=False)
    assert control.wait_for_end(run, TIMEOUT_SECONDS) is not None

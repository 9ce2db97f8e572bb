"""On a real GPU: ten seconds after a stop the driver shows the memory back, whatever the ranks ignore."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmtop.presets.errors import ExitCode
from llmtop.presets.resolve import Layer, resolve
from llmtop.presets.spec import ValueSource
from llmtop.profiler.hardware.machine import detect_machine
from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.record.endevents import SLACK_BYTES
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control
from llmtop.trainer.launch import start_run
from llmtop.tui.cli import main
from llmtop.tui.commands.stop import processes_left

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU"),
]
RUN: dict[str, Any] = {
    **{"model": "smollm2-135m", "gpus": 1, "micro_batch": 4, "seq_len": 512, "steps": 1_000_000},
    # No op of DeepSpeed's is compiled, nothing is fetched, nothing is written but the record.
    **{"optimizer": "adamw_torch", "tokenizer": "bytes", "classify_every": 0, "kernel_profile_step": 0},
    "sample_seconds": 0.2,
}
STOP_SECONDS = 10.0
"""What is promised."""
START_SECONDS = 300.0
"""For the first two steps; a machine that has just started reads the libraries for a minute."""
WEIGHTS_BYTES = 1 << 30
"""Weights, their copy in 32 bits and Adam's moments take more, so that its return is seen."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[RunDir]:
    """A run under its supervisor, with some steps and a look at its GPU behind it."""
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path))
    if request.param == "deaf":
        deaf = shlex.join([sys.executable, str(Path(__file__).with_name("deaf_rank.py"))])
        monkeypatch.setenv("LLMTOP_WORKER_COMMAND", deaf)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    layer = Layer(source=ValueSource.COMMAND_LINE, detail="test", values=RUN)
    spec = resolve([layer], name="stopped", machine=detect_machine())
    started = start_run(spec, predict(spec), root=tmp_path)
    try:
        wait_for_memory(started)
        if request.param == "standing still":
            (rank,) = ranks_of(started)
            rank.send_signal(signal.SIGSTOP)
        yield started
    finally:
        for pid in processes_left(started):
            os.kill(pid, signal.SIGKILL)


def wait_for_memory(run: RunDir) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        state = read_state(run)
        devices = state.hardware.devices if state.hardware else ()
        used = max((device.memory_used_bytes or 0 for device in devices), default=0)
        if state.steps_finished >= 2 and used > WEIGHTS_BYTES:
            return
        log = run.log_path(0)
        said = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        assert state.ended is None and time.monotonic() < end, (state.status, state.ended, said)
        time.sleep(0.05)


def ranks_of(run: RunDir) -> list[psutil.Process]:
    return [psutil.Process(rank.pid) for rank in read_state(run).ranks.values() if rank.pid is not None]


@pytest.mark.parametrize("run", ["listening", "deaf", "standing still"], indirect=True)
def test_memory_is_back_within_ten_seconds(
    run: RunDir, capsys: pytest.CaptureFixture[str], record_property: Any
) -> None:
    processes = [one for rank in ranks_of(run) for one in (rank, *rank.children(recursive=True))]
    began = time.monotonic()
    assert main(["stop", run.run_id]) == ExitCode.DONE
    seconds = time.monotonic() - began
    said = capsys.readouterr().out
    assert seconds <= STOP_SECONDS, said
    record_property("seconds", f"{seconds:.2f}")
    assert "no process is left" in said and "memory of GPU 0 is back" in said
    assert processes and not any(one.is_running() for one in processes)
    returned = read_state(run).memory_returned
    assert returned is not None
    (device,) = returned.devices
    assert device.is_back
    assert device.before_bytes is not None and device.after_bytes is not None
    assert (device.largest_bytes or 0) > device.before_bytes + WEIGHTS_BYTES
    # The driver says so to somebody else too.
    reader = NvmlReader()
    try:
        (index,) = reader.visible_indices()[:1]
        (sample,) = reader.sample([index])
    finally:
        reader.close()
    assert (sample.memory_used_bytes or 0) <= device.before_bytes + SLACK_BYTES
    end = control.wait_for_end(run, STOP_SECONDS)
    assert end is not None and end.state == "stopped"

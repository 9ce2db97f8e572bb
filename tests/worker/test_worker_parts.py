"""Parts of the worker that need no other rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.presets.errors import ExitCode, LlmtopError, UsageError
from llmtop.presets.spec import LrSchedule
from llmtop.profiler.oom.failure import failure_event, is_out_of_memory
from llmtop.profiler.probes.inmodules import count_parameters
from llmtop.profiler.probes.stepreading import StepReading
from llmtop.profiler.record.eventlog import EventTail, EventWriter
from llmtop.profiler.record.events import RankFailed, StageBegan, StageFinished, StepFinished
from llmtop.profiler.record.failureevents import MemoryShortage
from llmtop.trainer.statefile import Position, Progress, newest
from llmtop.trainer.worker.agreement import Agreed
from llmtop.trainer.worker.build import model_config
from llmtop.trainer.worker.callbacks import StepLog, StepOutcome, StepReporter
from llmtop.trainer.worker.failure import (
    exit_code,
    words_for_the_log,
)
from llmtop.trainer.worker.kernels import apply_liger
from llmtop.trainer.worker.optimizer import parameter_groups, schedule_factor
from llmtop.trainer.worker.place import place_from_environment
from llmtop.trainer.worker.stages import StageLog
from llmtop.trainer.worker.stopping import StopRequest
from tests.worker.launching import tiny_spec

KINDS: tuple[LrSchedule, ...] = ("constant", "linear", "cosine")


@given(kind=st.sampled_from(KINDS), steps=st.integers(1, 300), warmup=st.integers(0, 40))
def test_a_schedule_rises_to_the_peak_and_never_rises_again(
    kind: LrSchedule, steps: int, warmup: int
) -> None:
    factors = [
        schedule_factor(step, kind=kind, steps=steps, warmup_steps=warmup) for step in range(steps + 1)
    ]
    assert all(0 <= factor <= 1 for factor in factors)
    rising, falling = factors[:warmup], factors[warmup:]
    assert rising == sorted(rising) and (not rising or rising[0] > 0)
    assert falling == sorted(falling, reverse=True)
    if kind == "constant":
        assert all(factor == 1 for factor in falling)
    elif steps > warmup:
        assert falling[0] == 1 and factors[steps] == pytest.approx(0, abs=1e-12)


def test_norms_and_biases_are_not_decayed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    groups = parameter_groups(model, 0.1)
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.1), (3, 0.0)]
    assert len(parameter_groups(model, 0.0)) == 1
    model[0].weight.requires_grad_(False)
    assert [group["weight_decay"] for group in parameter_groups(model, 0.1)] == [0.0]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_running_out_of_memory_is_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)
    assert exit_code(error) == ExitCode.OUT_OF_MEMORY


def at(stage: str | None, step: int | None = None, micro_batch: int | None = None) -> Any:
    return SimpleNamespace(current=stage, step=step, micro_batch=micro_batch)


def test_the_real_host_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    event = failure_event(caught.value, at("forward", 7, 2))
    assert event.out_of_memory and (event.step, event.stage, event.micro_batch) == (7, "forward", 2)
    assert "Traceback" in event.traceback
    assert event.shortage == MemoryShortage(requested_bytes=1 << 60, on_host=True)
    assert event.where.startswith("worker/test_worker_parts.py:") and event.where.endswith("recognised")
    log = words_for_the_log(caught.value, "a-run")
    assert "Traceback" not in log and "llmtop report a-run" in log and str(caught.value) in log
    assert "ValueError: x" in words_for_the_log(ValueError("x"), "a-run")


def test_a_mistake_in_the_data_is_told_without_a_traceback() -> None:
    error = UsageError("a.jsonl, line 3: not JSON", fix="mend it")
    event = failure_event(error, at("data"))
    assert not event.out_of_memory and event.traceback == ""
    assert event.message == str(error)
    assert exit_code(error) == ExitCode.USAGE
    assert exit_code(ValueError()) == ExitCode.BUG
    assert failure_event(ValueError(), at(None)).message == "ValueError"


def test_a_stage_that_fails_stays_named(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    with EventWriter(path, "rank0") as events:
        stages = StageLog(events)
        with stages("import"):
            pass
        between = stages.current
        with pytest.raises(ValueError), stages("model"):
            raise ValueError
    assert (between, stages.current) == (None, "model")
    written = EventTail(path).poll()
    assert [type(event) for event in written] == [StageBegan, StageFinished, StageBegan]


def test_signals_only_set_flags() -> None:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        quiet = StopRequest()
        quiet.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (quiet.stop, quiet.save) == (True, False)
        # What a stop sends before it kills asks for no checkpoint, which nobody waits for.
        os.kill(os.getpid(), signal.SIGTERM)
        assert (quiet.stop, quiet.save) == (True, False)
        saving = StopRequest()
        saving.listen()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (saving.stop, saving.save) == (True, True)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_a_rank_without_its_place_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(UsageError, match="LOCAL_RANK"):
        place_from_environment()


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    import msgspec

    def make(name: str, content: bytes | None) -> None:
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "llmtop.json").write_bytes(content)

    def marker(step: int) -> bytes:
        return msgspec.json.encode(Progress(step=step, position=Position(index=step), world_size=2))

    assert newest(tmp_path) is None
    make("step-9", marker(9))
    make("step-10", marker(10))
    make("step-11", None)
    make("step-12", b"{")
    make("other", marker(99))
    found = newest(tmp_path)
    assert found is not None and (found.step, found.position.index) == (10, 10)


def test_the_configuration_is_the_file_without_its_packaging() -> None:
    spec = tiny_spec({"quantization_config": {"quant_method": "mxfp4"}, "auto_map": {"AutoModel": "x.y"}})
    config = model_config(spec)
    assert config.model_type == "llama" and config.hidden_size == 64
    assert config.use_cache is False
    assert not hasattr(config, "quantization_config")


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(UsageError, match="no model family 'lamma'"):
        model_config(tiny_spec({"model_type": "lamma"}))


def test_liger_is_refused_without_a_gpu() -> None:
    with pytest.raises(LlmtopError, match="need a GPU"):
        apply_liger("llama", "all", torch.device("cpu"))


def test_parameters_are_counted_by_what_trains() -> None:
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    counts = count_parameters(model)
    assert (counts.params, counts.trainable_params) == (8, 6)


def outcome(step: int, loss: float | None = 5.25) -> StepOutcome:
    return StepOutcome(
        step=step,
        agreed=Agreed(loss=loss, stop=False, save=False),
        learning_rate=None,
        grad_norm=None,
        loss_scale=None,
        skipped=loss is None,
        times=None,
        reading=StepReading(times=None, phase_memory={}),
    )


class DeviceFailed:
    """Times on a device that has failed since they were taken."""

    def step_seconds(self) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def phase_seconds(self) -> dict[str, float | None]:
        raise AssertionError("not asked for")


def test_steps_made_before_a_device_failed_are_told_without_their_times(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed = replace(outcome(7), times=DeviceFailed())
    with EventWriter(tmp_path / "log", "rank0") as events:
        reporter = StepReporter(tiny_spec(), 0, events.hold, StepLog(9, 0))
        for each in (outcome(6), failed):
            reporter.after_outcome(each)
        events.write(RankFailed(error_type="RuntimeError", message="CUDA error"))
    *steps, last = EventTail(tmp_path / "log").poll()
    assert [(e.step, e.loss, e.phase_seconds) for e in steps if isinstance(e, StepFinished)] == [
        (6, 5.25, {}),
        (7, 5.25, {}),
    ]
    assert isinstance(last, RankFailed)
    assert "the times of step 7 cannot be read" in caplog.text


def test_rank_0_logs_its_first_every_tenth_and_last_step(capfd: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        log = StepLog(25, rank)
        for step in range(3, 26):
            log.tell(outcome(step, None if step == 20 else 5.25), None if step == 3 else 0.25)
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step 3/25", "step 10/25", "step 20/25", "step 25/25"]
    assert lines[0] == "step 3/25, loss 5.2500, step time n/a"
    assert "loss not finite" in lines[2] and lines[2].endswith("skipped")


def test_the_log_tells_the_scale_of_a_loss_in_fp16(capfd: pytest.CaptureFixture[str]) -> None:
    StepLog(25, 0).tell(replace(outcome(1, None), loss_scale=65536.0), 0.25)
    assert capfd.readouterr().out.rstrip().endswith("loss scale 65536, skipped")


def test_a_full_disk_under_the_log_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    def full(line: str) -> None:
        raise OSError(28, "No space left on device")

    StepLog(25, 0, full).tell(outcome(1), 0.25)
    assert "step 1 could not be written" in caplog.text

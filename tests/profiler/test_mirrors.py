"""A run's figures copied elsewhere, and read back there."""

from __future__ import annotations

import importlib.util
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.resolve import Machine
from llmtop.profiler.mirrors import targets
from llmtop.profiler.mirrors.follow import mirror
from llmtop.profiler.mirrors.scalars import Row
from llmtop.profiler.mirrors.targets import (
    Asked,
    Described,
    MlFlow,
    Target,
    WeightsAndBiases,
    require_packages,
)
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.scriptevents import DevicesFound
from llmtop.trainer.script.unseen import unseen_prediction, unseen_spec, with_devices
from llmtop.tui.commands.mirror import start_mirror
from tests.recorded import Recorder, make_recorded_run
from tests.recorded_changes import make_changed_run
from tests.recorded_spec import recorded_prediction, recorded_spec

has_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboardX") is None, reason="tensorboardX is not installed"
)


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Of TensorBoard's event files: name to step to value."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, dict[int, float]] = {}
    for path in folder.rglob("events.out.tfevents.*"):
        for record in _records(path.read_bytes()):
            event = Event.FromString(record)
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def _records(content: bytes) -> Iterator[bytes]:
    """TFRecord: the length, its checksum, the record, its checksum."""
    at = 0
    while at + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        yield content[at + 12 : at + 12 + length]
        at += 12 + length + 4


@has_tensorboard
def test_tensorboard_gets_every_step(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path / "runs", kind="cuda", steps=20, tokenizer="hf_" + "aB3d" * 8)
    rows = mirror(run, Asked(tensorboard=tmp_path / "tb"), {})
    found = scalars(tmp_path / "tb" / run.run_id)
    assert rows > 40 and list(found["train/loss"]) == list(range(1, 21))
    assert found["train/loss"][20] < found["train/loss"][1]
    assert found["speed/step_seconds"][10] == pytest.approx(1.25, rel=0.1)
    assert found["gpu1/nvlink_tx_bytes_per_second"][20] == pytest.approx(41e9)
    assert found["memory/end_of_forward/activations"][1] > 1e9
    held = b"".join(path.read_bytes() for path in (tmp_path / "tb").rglob("events*"))
    assert b"seq_len: 2048" in held and b"aB3daB3d" not in held


@has_tensorboard
def test_a_process_of_its_own_follows_a_run_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path / "runs"))
    spec = recorded_spec("cpu", steps=9)
    run = RunDir.create(tmp_path / "runs", spec, recorded_prediction(spec), {})
    run.write_supervisor_pid()
    recorder = Recorder(run, spec, 1.7e9)
    recorder.start()
    recorder.step(1)
    reaper = start_mirror(run, Asked(tensorboard=tmp_path / "tb"))
    assert reaper is not None
    recorder.step(2)
    recorder.end("completed", 2)
    recorder.close()
    reaper.join(60)
    assert not reaper.is_alive()
    assert list(scalars(tmp_path / "tb")["train/loss"]) == [1, 2], run.mirror_log_path.read_text()
    assert "rows copied" in run.mirror_log_path.read_text()
    assert start_mirror(run, Asked()) is None


FIRST = Described(run_id="first", setting=0, options={"micro_batch": 4})
CHANGED = Described(run_id="first", setting=1, options={"micro_batch": 2, "gpu_name": "h200"})


class _Kept:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.described: list[tuple[int, dict[str, Any]]] = []

    def describe(self, run: Described, step: int) -> None:
        self.described.append((step, run.options))

    def write(self, row: Row) -> None: ...

    def flush(self) -> None: ...

    def close(self, status: str) -> None: ...


def test_a_place_is_told_what_was_found_after_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a script whose launch had no answer of the GPUs' driver."""
    machine = Machine(gpu="unknown", gpus=1, host_memory_bytes=1 << 30, driver_silent=True)
    spec = unseen_spec(("train.py",), tmp_path, machine)
    run = RunDir.create(tmp_path / "runs", spec, unseen_prediction(), {})
    run.write_supervisor_pid()
    recorder = Recorder(run, spec, 1.7e9)
    recorder.start()
    recorder.step(1)
    places = list[_Kept]()

    def opened(asked: Asked, told: Described) -> list[Target]:
        assert "gpu_name" not in told.options and "model_name" not in told.options
        places.append(_Kept())
        return list[Target](places)

    def answered() -> None:
        found = with_devices(spec, Machine(gpu="h200", gpus=1, host_memory_bytes=1 << 30))
        setting = run.add_setting(found, unseen_prediction(), {})
        recorder.supervisor.write(DevicesFound(setting=setting))
        recorder.end("completed", 1)

    monkeypatch.setattr("llmtop.profiler.mirrors.follow.open_targets", opened)
    mirror(run, Asked(wandb="x"), {}, pause=answered)
    recorder.close()
    ((step, options),) = places[0].described
    assert step == 1 and (options["gpu_name"], options["gpu"]) == ("h200", "h200")


def test_a_place_is_told_of_each_change_after_the_last_step_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a run that has ended on another setting than it was launched with."""
    run = make_changed_run(tmp_path)
    run.put_in_force(2)
    place, first = _Kept(), list[dict[str, Any]]()

    def opened(asked: Asked, told: Described) -> list[Target]:
        first.append(told.options)
        return [place]

    monkeypatch.setattr("llmtop.profiler.mirrors.follow.open_targets", opened)
    mirror(run, Asked(wandb="x"), {})
    told = [(0, first[0]), *place.described]
    names = ("micro_batch", "gradient_checkpointing")
    assert [(step, *(options[name] for name in names)) for step, options in told] == [
        (0, 4, False),
        (12, 8, False),
        (24, 8, True),
    ]


class _Breaks:
    def describe(self, run: Described, step: int) -> None: ...

    def write(self, row: Row) -> None:
        raise ConnectionError("nobody listens")

    def flush(self) -> None: ...

    def close(self, status: str) -> None: ...


def test_a_place_that_fails_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_recorded_run(tmp_path, steps=3)
    monkeypatch.setattr("llmtop.profiler.mirrors.follow.open_targets", lambda *_: [_Breaks()])
    with pytest.raises(LlmtopError, match="not copied any more") as told:
        mirror(run, Asked(wandb="x"), {})
    assert "nobody listens" in told.value.why and "goes on" in told.value.fix


def test_a_library_that_is_not_there_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--mlflow needs mlflow") as told:
        require_packages(Asked(mlflow="x"))
    assert ".[mlflow]" in told.value.fix
    require_packages(Asked())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = make_recorded_run(tmp_path / "runs", steps=5)
    mirror(run, Asked(wandb="llmtop-test"), os.environ)
    (kept,) = tmp_path.rglob("run-*.wandb")
    content = kept.read_bytes()
    assert b"train/loss" in content and b"speed/step_seconds" in content
    place = WeightsAndBiases("llmtop-test", FIRST)
    place.describe(CHANGED, 3)
    place.close("completed")
    (kept,) = tmp_path.rglob("run-first.wandb")
    assert b"gpu_name" in kept.read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_keeps_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database would take another package
    run, uri = make_recorded_run(tmp_path / "runs", steps=5), (tmp_path / "mlflow").as_uri()
    mirror(run, Asked(mlflow=uri), {})
    client: Any = MlflowClient(tracking_uri=uri)
    (kept,) = client.search_runs([client.get_experiment_by_name("llmtop").experiment_id])
    assert kept.info.status == "FINISHED" and kept.data.params["seq_len"] == "256"
    steps = [metric.step for metric in client.get_metric_history(kept.info.run_id, "train/loss")]
    assert steps == [1, 2, 3, 4, 5]
    place = MlFlow(uri, FIRST)
    place.describe(CHANGED, 3)
    place.describe(FIRST, 4)
    place.close("completed")
    (changed,) = client.search_runs([kept.info.experiment_id], f"attributes.run_name = '{FIRST.run_id}'")
    assert changed.data.params == {"micro_batch": "4", "gpu_name": "h200"}
    assert changed.data.tags["micro_batch"] == "4", "the newest"

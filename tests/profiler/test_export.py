"""An archive of a run: what is in it, and what never is."""

from __future__ import annotations

import csv
import errno
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.spec import Script
from llmtop.profiler.export import packing
from llmtop.profiler.export.archive import Choices, export_run
from llmtop.profiler.export.environment import read_environment
from llmtop.profiler.export.manifest import Manifest
from llmtop.profiler.export.secrets import REMOVED
from llmtop.profiler.export.tables import DEVICES, STEPS, TableWriter, csv_lines
from llmtop.profiler.record.changeevents import ChangeApplied, ChangeAsked, ChangeRefused, KeyChange
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import UNREAD_STEPS, PhaseMemory, RankFailed, StepFinished
from llmtop.profiler.record.remote import Remote, write_remote
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.stepevents import BETWEEN
from llmtop.profiler.record.wholefile import write_atomic
from llmtop.trainer.hosts import starters
from tests.recorded import make_recorded_run
from tests.recorded_spec import recorded_prediction, recorded_spec


def unpacked(archive: Path) -> dict[str, bytes]:
    """Members by their name within the run."""
    with zipfile.ZipFile(archive) as opened:
        assert opened.testzip() is None
        return {name.partition("/")[2]: opened.read(name) for name in opened.namelist()}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_archive_holds_the_record_its_tables_and_the_page(tmp_path: Path, kind: Any) -> None:
    run = make_recorded_run(tmp_path / "runs", kind=kind, steps=20)
    made = export_run(run, tmp_path / "run.zip", choices=Choices(parquet=False), environment={})
    files = unpacked(tmp_path / "run.zip")
    for name in ("supervisor.jsonl", "hardware.jsonl", "rank-0.jsonl", "rank-1.jsonl", "rank-0.log"):
        assert files[name] == (run.path / name).read_bytes()
    assert msgspec.json.decode(files["spec.json"]) == msgspec.json.decode(run.spec_path.read_bytes())
    manifest = msgspec.json.decode(files["manifest.json"], type=Manifest)
    assert manifest.files == {n: len(c) for n, c in files.items() if n != "manifest.json"}
    assert manifest.status == "completed" and made.secrets_removed == 0
    assert files["report.html"].startswith(b"<!DOCTYPE html>") and made.page_bytes == len(
        files["report.html"]
    )
    assert msgspec.json.decode(files["report.json"])["run_id"] == run.run_id
    environment = msgspec.json.decode(files["environment.json"])
    assert environment["versions"]["torch"] == "2.13.0"
    assert (environment["topology"] is None) == (kind == "cpu")
    steps = list(csv.DictReader(io.StringIO(files["metrics/steps.csv"].decode())))
    assert [(row["rank"], row["step"]) for row in steps[:2]] == [("0", "1"), ("1", "1")]
    assert len(steps) == 40 and float(steps[-1]["loss"]) < float(steps[0]["loss"])
    assert tuple(steps[0]) == STEPS.columns
    devices = list(csv.DictReader(io.StringIO(files["metrics/devices.csv"].decode())))
    assert bool(devices) == (kind == "cuda")
    assert b"end_of_forward,activations," in files["memory.csv"]
    assert "control" not in str(sorted(files)) and "supervisor.pid" not in files


def test_what_belongs_to_this_machine_stays_here(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path / "runs", kind="cpu", steps=2)
    write_remote(run.path, Remote(host="gpu-1", path="/far/run", alive=True))
    write_atomic(run.path / starters._VARIABLES, b'{"PLAIN": "Zq7-planted"}')
    export_run(run, tmp_path / "run.zip", choices=Choices(parquet=False), environment={})
    files = unpacked(tmp_path / "run.zip")
    assert "remote.json" not in files
    assert not any(b"Zq7-planted" in content for content in files.values())


def test_secrets_are_in_no_file_of_the_archive(tmp_path: Path) -> None:
    planted = {
        "in the environment": "Zq7-planted-in-environment",
        "in arguments": "Zq7-planted-in-arguments",
        "in an option": "hf_" + "Zq7planted" * 4,
        "in the DeepSpeed file": "Zq7-planted-in-deepspeed",
        "in a change": "Zq7-planted-in-a-change",
        "in a failure": "Zq7-planted-in-a-failure",
        "in a log": "Zq7-planted-in-a-log",
        "in an address": "Zq7-planted-in-an-address",
        "in a setting": "Zq7-planted-in-a-setting",
        "in stacks": "Zq7-planted-in-stacks",
    }
    spec = recorded_spec(
        "cpu", data=f"https://joe:{planted['in an address']}@host/data", tokenizer=planted["in an option"]
    )
    argv = [
        "python",
        "train.py",
        "--hub-token",
        planted["in arguments"],
        f"--api_key={planted['in arguments']}",
    ]
    spec = replace(spec, script=Script(command=tuple(argv), folder="/home/me"))
    config = {"comet": {"api_key": planted["in the DeepSpeed file"]}}
    run = RunDir.create(tmp_path / "runs", spec, recorded_prediction(spec), config)
    later = recorded_spec("cpu", deepspeed={"comet": {"api_key": planted["in a setting"]}})
    run.add_setting(replace(later, script=spec.script), recorded_prediction(later), config)
    variables = {"MY_HUB_TOKEN": planted["in the environment"], "HF_TOKEN": planted["in an option"]}
    run.environment_path.write_bytes(msgspec.json.encode(read_environment(variables)))
    with EventWriter(run.events_path("supervisor"), "supervisor") as writer:
        asked = (f"deepspeed.comet.api_key={planted['in a change']}",)
        writer.write(ChangeRefused(asked=asked, reason="no such key"))
        key = KeyChange(key="deepspeed.comet.api_key", new=planted["in a setting"])
        writer.write(ChangeAsked(setting=1, changes=(key,)))
    with EventWriter(run.events_path(0), "rank0") as writer:
        writer.write(StepFinished(step=1, step_seconds=1.0))
        writer.write(ChangeApplied(setting=1, step=2))
        failure = planted["in a failure"]
        writer.write(
            RankFailed(
                error_type="OSError",
                message=f"401 for token='{failure}' password={failure}",
                traceback=f'File "x.py"\n  login(api_key="{failure}")\n',
                details={"hub_token": failure, "seen": [planted["in the environment"]]},
            )
        )
    run.log_path(0).write_text(
        f"step 1\nWANDB_API_KEY={planted['in a log']}\rHF_TOKEN={planted['in a log']}\n"
        f"env: {planted['in the environment']}\n" * 3
    )
    run.stacks_dir.mkdir()
    (run.stacks_dir / "rank-0.txt").write_text(f"connect(password='{planted['in stacks']}')")
    made = export_run(run, tmp_path / "run.zip", environment=variables)
    files = unpacked(tmp_path / "run.zip")
    assert {"settings/1/deepspeed.json", "stacks/rank-0.txt", "report.html"} <= files.keys()
    assert b"as launched" in files["report.html"], "or its settings would not be told"
    found = {
        (where, name) for where, secret in planted.items() for name in files if secret.encode() in files[name]
    }
    assert not found
    assert made.secrets_removed >= len(planted)
    assert REMOVED.encode() in files["rank-0.log"] and files["rank-0.log"].count(b"step 1\n") == 3
    command = msgspec.json.decode(files["spec.json"])["script"]["command"]
    assert command == ["python", "train.py", "--hub-token", REMOVED, f"--api_key={REMOVED}"]
    assert b"train.py --hub-token [removed] --api_key=[removed]<" in files["report.html"]


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path / "runs", steps=4)
    (run.checkpoints_dir / "step-4").mkdir()
    (run.checkpoints_dir / "step-4" / "model.safetensors").write_bytes(b"x" * 1000)
    (run.path / "snapshots").mkdir()
    (run.path / "snapshots" / "rank-0.pickle").write_bytes(b"\x80\x04 memory")
    (run.path / ".unfinished.new").write_text("x")
    (run.path / "elsewhere.json").symlink_to("/etc/hostname")
    (run.path / "odd\nname.txt").write_text("x")
    made = export_run(run, tmp_path / "a.zip", choices=Choices(logs=False, parquet=False))
    left = {one.name: one for one in made.left_out}
    odd = {"odd\nname.txt"}
    assert left.keys() == {"checkpoints", "snapshots/rank-0.pickle", "rank-0.log", "rank-1.log"} | odd
    assert (left["checkpoints"].size_bytes, left["checkpoints"].files) == (1000, 1)
    files = unpacked(tmp_path / "a.zip")
    assert not any(name.startswith(("checkpoints", "snapshots", ".", "rank-0.log", "else")) for name in files)
    assert "checkpoints (1000 B)" in files["README.txt"].decode()
    export_run(run, tmp_path / "b.zip", choices=Choices(snapshots=True, parquet=False))
    assert unpacked(tmp_path / "b.zip")["snapshots/rank-0.pickle"] == b"\x80\x04 memory"


def test_a_run_that_goes_on_is_exported_as_far_as_it_is(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path / "runs", steps=6, end=None)
    whole = run.events_path(0).read_bytes()
    with run.events_path(0).open("ab") as log:
        log.write(b'{"kind":"step_finished","v":1,"t":1')
    export_run(run, tmp_path / "a.zip", choices=Choices(parquet=False))
    files = unpacked(tmp_path / "a.zip")
    assert files["rank-0.jsonl"] == whole
    assert msgspec.json.decode(files["manifest.json"])["status"] == "running"


def test_the_place_of_an_archive(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path / "runs", steps=2)
    out = tmp_path / "a.zip"
    out.write_text("mine")
    with pytest.raises(UsageError, match="there already"):
        export_run(run, out)
    assert out.read_text() == "mine"
    export_run(run, out, force=True, choices=Choices(parquet=False))
    assert zipfile.is_zipfile(out)
    with pytest.raises(UsageError, match="is a folder"):
        export_run(run, tmp_path)
    with pytest.raises(UsageError, match="is not there"):
        export_run(run, tmp_path / "nowhere" / "a.zip")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "runs"]


@pytest.mark.parametrize("member", ["hardware.jsonl", "metrics/steps.csv", "report.html"])
def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str
) -> None:
    run = make_recorded_run(tmp_path / "runs", steps=4)
    real = packing.Packer._entry

    def full(packer: packing.Packer, name: str, *args: Any, **more: Any) -> Any:
        if name == member:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(packer, name, *args, **more)

    monkeypatch.setattr(packing.Packer, "_entry", full)
    with pytest.raises(LlmtopError) as told:
        export_run(run, tmp_path / "a.zip", choices=Choices(parquet=False))
    assert told.value.why == os.strerror(errno.ENOSPC) and "free some space" in told.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_log_is_read_in_whole_lines_whatever_ends_them() -> None:
    long = b"a" * (3 << 20)
    content = b"one\ntwo\r" + long + b"\nlast"
    parts = list(packing.whole_lines(io.BytesIO(content), keep_rest=True))
    assert b"".join(parts) == content and all(part.endswith((b"\n", b"\r")) for part in parts[:-1])
    assert b"".join(packing.whole_lines(io.BytesIO(content), keep_rest=False)).endswith(long + b"\n")


def test_csv_rows_say_what_is_not_known_by_nothing() -> None:
    assert csv_lines([(1, None, 2.5, True), (2, 0.5, None, False)]) == b"1,,2.5,true\n2,0.5,,false\n"
    assert STEPS.kinds()["step"] == "int64" and DEVICES.kinds()["power_watts"] == "float64"


def test_parquet_holds_what_the_csv_does(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    run = make_recorded_run(tmp_path / "runs", kind="cuda", steps=10)
    export_run(run, tmp_path / "a.zip", choices=Choices(parquet=True))
    files = unpacked(tmp_path / "a.zip")
    for name in ("steps", "devices", "host", "processes"):
        table = parquet.read_table(io.BytesIO(files[f"metrics/{name}.parquet"]))
        rows = list(csv.DictReader(io.StringIO(files[f"metrics/{name}.csv"].decode())))
        assert table.num_rows == len(rows) and table.column_names == list(rows[0])
    steps = parquet.read_table(io.BytesIO(files["metrics/steps.parquet"]))
    assert str(steps.schema.field("step").type) == "int64"
    assert str(steps.schema.field("profiled").type) == "bool"
    assert steps.column("loss_scale").null_count == steps.num_rows


def test_the_environment_keeps_what_training_hangs_on(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    variables = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HF_TOKEN": "qwerty12",
        "HOME": "/home/me",
        "NCCL_DEBUG": "INFO",
    }
    found = read_environment(variables, driver=driver)
    assert found.driver == "580.65.06"
    assert found.variables == {"CUDA_VISIBLE_DEVICES": "0,1", "HF_TOKEN": REMOVED, "NCCL_DEBUG": "INFO"}
    assert read_environment({}, driver=tmp_path / "none").driver is None


def test_a_step_that_was_not_read_has_no_memory_and_the_next_one_tells_its_peak(tmp_path: Path) -> None:
    memory = {
        UNREAD_STEPS: PhaseMemory(peak_bytes=9, reserved_bytes=10),
        "backward": PhaseMemory(allocated_bytes=6, peak_bytes=8, reserved_bytes=10),
    }
    writer = TableWriter(tmp_path)
    writer.add(
        [
            StepFinished(step=19, memory_every=10, phase_seconds={"data": 0.25, BETWEEN: 0.5}, src="rank0"),
            StepFinished(step=20, memory_every=10, phase_memory=memory, src="rank0"),
        ]
    )
    writer.close()
    unread, read = csv.DictReader(io.StringIO(writer.paths["steps"].read_text()))
    assert unread["memory_every"] == read["memory_every"] == "10"
    times = {name: unread[name] for name in unread if name.endswith("_seconds") and unread[name]}
    assert times == {"step_seconds": "0.0", "data_seconds": "0.25", "between_seconds": "0.5"}
    names = [name for name in unread if name.endswith("_bytes")]
    assert len(names) == 14 and {unread[name] for name in names} == {""}
    assert {name: read[name] for name in names if read[name]} == {
        "backward_allocated_bytes": "6",
        "backward_peak_bytes": "8",
        "backward_reserved_bytes": "10",
        "unread_steps_peak_bytes": "9",
        "unread_steps_reserved_bytes": "10",
    }

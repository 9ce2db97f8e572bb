"""Run folders appear whole, are found by what people type, and survive being broken."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.record import rundir
from llmtop.profiler.record.naming import cut_words, meant, short_ids
from llmtop.profiler.record.processidentity import process_identity
from llmtop.profiler.record.rundir import RunDir, find_run, list_runs
from llmtop.profiler.record.wholefile import write_atomic
from llmtop.trainer.hosts import farruns
from tests.recorded import make_recorded_run
from tests.recorded_spec import recorded_prediction, recorded_spec


def new_run(root: Path, name: str = "cpu-demo") -> RunDir:
    spec = msgspec.structs.replace(recorded_spec(), name=name)
    return RunDir.create(root, spec, recorded_prediction(spec), {"zero_optimization": {"stage": 2}})


def named(root: Path, run_id: str) -> RunDir:
    """A run with an id of our choosing."""
    run = new_run(root)
    return RunDir(run.path.rename(root / run_id))


def test_a_new_run_is_private_complete_and_reads_back(tmp_path: Path) -> None:
    run = new_run(tmp_path / "deep" / "runs")
    again = RunDir.open(run.path)
    assert again.spec() == run.spec()
    assert again.prediction() == run.prediction()
    assert again.deepspeed_config() == {"zero_optimization": {"stage": 2}}
    for path in (run.path, run.control_dir, run.checkpoints_dir):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.spec_path.stat().st_mode) == 0o600
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")]


def test_ids_are_unique_readable_and_sort_by_start(tmp_path: Path) -> None:
    ids = [new_run(tmp_path, "Full fine-tune: ZeRO/3!").run_id for _ in range(5)]
    assert len(set(ids)) == 5
    assert all("-full-fine-tune-zero-3-" in i for i in ids)
    assert [run.run_id for run in list_runs(tmp_path)] == list(reversed(ids))


def test_one_that_was_given_a_name_is_as_old_as_its_folder(tmp_path: Path) -> None:
    named, dated = new_run(tmp_path), [new_run(tmp_path) for _ in range(2)]
    named.path.rename(tmp_path / "before")
    os.utime(tmp_path / "before" / "spec.json", (1.7e9, 1.7e9))
    ids = [run.run_id for run in reversed(dated)]
    assert [run.run_id for run in list_runs(tmp_path)] == [*ids, "before"]
    assert find_run(tmp_path, "latest").run_id == ids[0]
    assert [folder.name for folder in farruns._newest_first(tmp_path)] == [*ids, "before"]
    os.utime(tmp_path / "before" / "spec.json", (4e9, 4e9))
    assert find_run(tmp_path, "latest").run_id == "before"


def test_file_names(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.events_path("supervisor").name == "supervisor.jsonl"
    assert run.events_path("hardware").name == "hardware.jsonl"
    assert run.events_path(3).name == run.events_path("rank3").name == "rank-3.jsonl"
    assert run.log_path(12).name == "rank-12.log"
    assert run.log_path("supervisor").name == "supervisor.log"
    for name in ("rank-10.jsonl", "rank-2.jsonl", "rank-x.jsonl", "rank-3.log"):
        (tmp_path / name).touch()
    assert list(run.rank_events()) == [2, 10]


def test_create_in_a_place_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LlmtopError, match="cannot create a run") as caught:
        new_run(tmp_path / "file")
    assert "LLMTOP_RUNS_DIR" in caught.value.fix


@pytest.mark.parametrize("content", [b"", b"{", b'{"name": "x"}', b"\xff\xfe", b"[]"])
def test_a_broken_spec_is_named(tmp_path: Path, content: bytes) -> None:
    run = new_run(tmp_path)
    run.spec_path.write_bytes(content)
    with pytest.raises(LlmtopError, match=r"spec\.json"):
        RunDir.open(run.path)


def test_an_unknown_key_in_a_spec_is_an_error(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.spec_path.write_text(run.spec_path.read_text().replace('"name"', '"nme": 1, "name"', 1))
    with pytest.raises(LlmtopError, match=r"spec\.json"):
        RunDir.open(run.path)


def test_a_missing_or_broken_prediction_is_named_when_asked_for(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.prediction_path.unlink()
    opened = RunDir.open(run.path)
    with pytest.raises(LlmtopError, match=r"prediction\.json"):
        opened.prediction()
    run.deepspeed_path.write_text("[1]")
    with pytest.raises(LlmtopError, match=r"deepspeed\.json"):
        opened.deepspeed_config()
    with pytest.raises(LlmtopError, match="not a run"):
        RunDir.open(tmp_path / "nothing")


@given(st.sets(st.text("ab-12", min_size=1, max_size=14), min_size=1, max_size=30))
def test_a_short_id_is_taken_for_its_run(names: set[str]) -> None:
    ids = sorted({name.strip("-") or "a" for name in names})
    for one, word in short_ids(ids).items():
        assert _meant(word, ids) == one and (word in one) and not word.startswith("-")


def test_short_ids_are_read_and_typed() -> None:
    known = {
        "20261129-184512-cpu-demo-3f2a": "3f2a",
        "before": "before",
        "lr-1e-5-long-run-1": "run-1",
        "lr-1e-5-long-run-2": "run-2",
        "my-very-long-experiment": "my-very",
        "thisnameishardtosplit": "plit",
    }
    assert short_ids([*known]) == known
    # Those that come later may end alike; what is read of the others stays.
    later = short_ids([*known, "20261129-184614-cpu-demo-3f2a", "before-2", "my-very-last-experiment"])
    assert {one: word for one, word in later.items() if known.get(one) == word} == {
        one: word for one, word in known.items() if word not in ("3f2a", "my-very")
    }
    assert later["20261129-184512-cpu-demo-3f2a"] == "20261129-1845"
    assert later["my-very-long-experiment"] == "my-very-long"
    assert short_ids(["latest", "older"])["latest"] == "test", "that word means the newest"
    assert _meant("test", ["older", "latest"]) == "latest"
    assert [cut_words(word, "my-very-long") for word in ("my-very", "long", "my-very-long")] == [
        "my-very…",
        "…long",
        "my-very-long",
    ]


def _meant(word: str, ids: list[str]) -> str:
    return meant(word, ids, thing="run", things="runs", empty=UsageError("none"), otherwise="")


def test_listing_passes_over_what_is_not_a_run(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    (tmp_path / "half-written").mkdir()
    (tmp_path / ".20260101-000000-x-aaaa.new").mkdir()
    (tmp_path / "stray file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert [r.run_id for r in list_runs(tmp_path)] == [run.run_id]
    assert list_runs(tmp_path / "missing") == ()


def test_find_by_id_prefix_ending_latest_and_path(tmp_path: Path) -> None:
    old = named(tmp_path, "20260101-000000-cpu-demo-aaaa")
    new = named(tmp_path, "20260202-000000-cpu-demo-bbbb")
    for ref in (old.run_id, "20260101", "aaaa", "cpu-demo-aaaa", f"{tmp_path}/{old.run_id}"):
        assert find_run(tmp_path, ref).run_id == old.run_id
    assert find_run(tmp_path, "latest").run_id == new.run_id


def test_an_exact_id_wins_over_longer_ones(tmp_path: Path) -> None:
    named(tmp_path, "20260101-demo-aaaa")
    named(tmp_path, "20260101-demo-aaaa2")
    assert find_run(tmp_path, "20260101-demo-aaaa").run_id == "20260101-demo-aaaa"


def test_what_is_not_found_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run 'x'") as empty:
        find_run(tmp_path, "x")
    assert "llmtop demo" in empty.value.fix
    named(tmp_path, "20260101-000000-cpu-demo-aaaa")
    named(tmp_path, "20260102-000000-cpu-demo-bbbb")
    with pytest.raises(UsageError) as near:
        find_run(tmp_path, "20260101-00000-cpudemo-aaaa")
    assert "20260101-000000-cpu-demo-aaaa" in near.value.fix
    with pytest.raises(UsageError) as far:
        find_run(tmp_path, "zzz")
    assert "20260102-000000-cpu-demo-bbbb" in far.value.fix
    with pytest.raises(UsageError, match="means 2 runs") as many:
        find_run(tmp_path, "2026")
    assert "aaaa" in many.value.why and "bbbb" in many.value.why


def test_the_supervisor_is_alive_while_its_process_is(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert not run.supervisor_alive()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        run.write_supervisor_pid(child.pid)
        assert run.supervisor_alive()
        child.send_signal(signal.SIGKILL)
        # Not yet waited for, it becomes a zombie, which must not count as alive.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not run.supervisor_alive()
    finally:
        child.kill()
        child.communicate()
    assert not run.supervisor_alive()
    with pytest.raises(LlmtopError, match="ended at once"):
        run.write_supervisor_pid(child.pid)


def test_a_reused_pid_is_not_life(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    mine = process_identity(os.getpid())
    assert mine is not None
    for other in (
        msgspec.structs.replace(mine, started_ticks=mine.started_ticks - 1),
        msgspec.structs.replace(mine, boot_id="another boot"),
    ):
        write_atomic(run.supervisor_pid_path, msgspec.json.encode(other))
        assert not run.supervisor_alive()
    write_atomic(run.supervisor_pid_path, b"42\n")
    assert not run.supervisor_alive()


def test_a_failed_atomic_write_leaves_the_old_content_and_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "spec.json"
    write_atomic(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["spec.json"]


def test_runs_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path))
    assert rundir.runs_root() == tmp_path
    monkeypatch.delenv("LLMTOP_RUNS_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert rundir.runs_root() == Path("/state/llmtop/runs")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert rundir.runs_root() == Path("/home/someone/.local/state/llmtop/runs")


@pytest.mark.parametrize("ref", ["", " "])
def test_nothing_means_no_run(ref: str, tmp_path: Path) -> None:
    new_run(tmp_path)
    with pytest.raises(UsageError, match="no run is named"):
        find_run(tmp_path, ref)


@pytest.mark.parametrize("value", ["rank9", "9", "9.0a", "", "nan"])
def test_a_capability_that_is_no_number_is_refused(value: str, tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, kind="cuda", steps=1)
    told = json.loads(run.spec_path.read_text())
    told["gpu"]["compute_capability"] = value
    run.spec_path.write_text(json.dumps(told))
    with pytest.raises(LlmtopError, match=r"(?s)cannot read .*spec\.json.*compute_capability"):
        RunDir.open(run.path)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        *(("model", "num_layers", 2_001), ("model", "hidden_size", 1 << 63)),
        *(("model", "vocab_size", 1 << 40), ("model", "head_dim", 1 << 20)),
        *(("options", "gpus", 1 << 18), ("options", "nodes", 10**9), ("options", "seq_len", 10**13)),
    ],
)
def test_a_spec_of_no_run_is_refused(part: str, key: str, value: int, tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, steps=1)
    told = json.loads(run.spec_path.read_text())
    told[part][key] = value
    run.spec_path.write_text(json.dumps(told))
    with pytest.raises(LlmtopError, match=rf"(?s)cannot read .*spec\.json.*({key} = |ranks)"):
        RunDir.open(run.path)


@pytest.mark.parametrize("name", ["a;b", "$(id)", "a b\nc", "`x`", "a|b", "\x1b[31m", "'"])
def test_a_folder_whose_name_a_shell_would_act_on_is_no_run(name: str, tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, steps=1)
    odd = run.path.rename(tmp_path / name)
    with pytest.raises(LlmtopError, match="is not taken for a run"):
        RunDir.open(odd)

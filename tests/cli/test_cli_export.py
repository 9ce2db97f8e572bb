"""`llmtop export`, `import-run`, `report --html`, `compare --html` as they are typed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.record.rundir import RunDir, list_runs
from llmtop.profiler.record.unwritable import unwritable
from llmtop.trainer.launch import resume_run
from llmtop.trainer.supervisor.rankenv import RUN_ID
from tests.cli.conftest import Llmtop
from tests.recorded import make_recorded_run
from tests.trainer.supervised import fake_ranks


def test_there_and_back(
    llmtop: Llmtop, runs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_recorded_run(runs_root, steps=8)
    monkeypatch.chdir(tmp_path)
    made = llmtop("export", "latest", "--no-parquet")
    archive = tmp_path / f"{run.run_id}.llmtop.zip"
    assert made.code == ExitCode.DONE and made.out.startswith(f"{archive.name}: ")
    assert zipfile.is_zipfile(archive)
    again = llmtop("export", "latest")
    assert again.code == ExitCode.USAGE and "--force" in again.err
    told = llmtop("export", "latest", "--force", "--no-logs", "--json").json()
    assert {left["name"] for left in told["left_out"]} == {"rank-0.log", "rank-1.log"}
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path / "here"))
    brought = llmtop("import-run", archive.name)
    assert brought.code == ExitCode.DONE and f"llmtop report {run.run_id}" in brought.out
    assert llmtop("report", "latest", "--json").json()["steps_finished"] == 8
    (line,) = llmtop("ls", "--json").json()["runs"]
    assert line["imported"] is True
    assert "completed, imported" in llmtop("ls").out
    assert "step 8" in llmtop("logs", "latest").out or llmtop("logs", "latest").code == ExitCode.DONE
    other = llmtop("import-run", archive.name, "--name", "other", "--json").json()
    assert other == {"run_id": "other", "path": str(tmp_path / "here" / "other")}
    assert llmtop("compare", run.run_id, "other").code == ExitCode.DONE
    assert llmtop("delete", "other", "--yes").code == ExitCode.DONE
    assert llmtop("import-run", "nothing.zip").code == ExitCode.USAGE
    assert "is no size" in llmtop("import-run", archive.name, "--limit", "0").err


def test_an_imported_run_is_only_looked_at(
    llmtop: Llmtop, runs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_recorded_run(runs_root, steps=4, end=None)
    assert llmtop("export", "latest", "--out", str(tmp_path / "a.zip")).code == ExitCode.DONE
    # A process of the run itself, which goes on here under the same id.
    own = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"],
        env={**os.environ, RUN_ID: run.run_id},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert own.stdout is not None and own.stdout.readline()
        monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path / "here"))
        assert llmtop("import-run", str(tmp_path / "a.zip")).code == ExitCode.DONE
        for words in (("stop", "latest"), ("resume", "latest")):
            answer = llmtop(*words)
            assert answer.code == ExitCode.USAGE and "came from an archive" in answer.err
        assert llmtop("set", "latest", "micro_batch=2").code == ExitCode.USAGE
        assert llmtop("stacks", "latest").code == ExitCode.USAGE
        found = RunDir.open(tmp_path / "here" / run.run_id)
        with pytest.raises(UsageError, match="cannot be gone on with"):
            resume_run(found)
        assert llmtop("delete", "latest", "--yes").code == ExitCode.DONE
        assert own.poll() is None, "what goes on here was left alone"
    finally:
        own.kill()
        own.communicate()


def test_pages(llmtop: Llmtop, runs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = make_recorded_run(runs_root, steps=8), make_recorded_run(runs_root, steps=8, zero=1)
    monkeypatch.chdir(tmp_path)
    assert llmtop("report", one.run_id, "--html").out.startswith(f"{one.run_id}.html: ")
    assert (tmp_path / f"{one.run_id}.html").read_text().startswith("<!DOCTYPE html>")
    assert llmtop("report", one.run_id, "--html", "x.html").code == ExitCode.DONE
    assert llmtop("report", one.run_id, "--html", "--out", "y.html").out.startswith("y.html: ")
    assert (tmp_path / "y.html").read_text() == (tmp_path / "x.html").read_text()
    assert "fix: give one of them" in llmtop("report", one.run_id, "--html", "a", "--out", "b").err
    assert "--html --out b" in llmtop("report", one.run_id, "--out", "b").err
    assert llmtop("compare", one.run_id, two.run_id, "--html", "c.html").code == ExitCode.DONE
    assert "Two runs side by side" in (tmp_path / "c.html").read_text()
    assert "is a folder" in llmtop("report", one.run_id, "--html", str(tmp_path)).err
    gone = llmtop("report", one.run_id, "--html", str(tmp_path / "nowhere" / "x.html"))
    assert gone.code == ExitCode.USAGE and "cannot be written" in gone.err
    assert "there is no folder" in gone.err and "mkdir -p" in gone.err and "space" not in gone.err
    below = llmtop("compare", one.run_id, two.run_id, "--html", str(tmp_path / "c.html" / "x.html"))
    assert "is not a folder" in below.err and "space" not in below.err
    assert llmtop("report", one.run_id, "--html", "--json").code == ExitCode.USAGE


def test_the_umask_says_who_may_read_pages_and_archives(
    llmtop: Llmtop, runs_root: Path, tmp_path: Path
) -> None:
    run = make_recorded_run(runs_root, steps=2)
    page, archive = tmp_path / "a.html", tmp_path / "a.zip"
    before = os.umask(0o027)
    try:
        assert llmtop("report", run.run_id, "--html", str(page)).code == ExitCode.DONE
        assert llmtop("export", run.run_id, "--out", str(archive)).code == ExitCode.DONE
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (page, archive)] == [0o640, 0o640]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EACCES, "is not writable for you"),
        (errno.EROFS, "only read"),
        (errno.ENOENT, "there is no folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_told_by_what_is_wrong_with_it(number: int, words: str) -> None:
    told = str(unwritable(Path("/there/a.html"), OSError(number, os.strerror(number)), "name another place"))
    assert words in told and ("space" in told) is (number == errno.ENOSPC) and "another place" in told


@pytest.mark.skipif(find_spec("tensorboardX") is None, reason="tensorboardX is not installed")
def test_a_launched_run_is_mirrored_to_its_end(
    llmtop: Llmtop, runs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ranks(monkeypatch, "finishes")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_" + "aB3d" * 8)
    answer = llmtop("run", "cpu-demo", "--headless", "--tensorboard", str(tmp_path / "tb"))
    assert answer.code == ExitCode.DONE and "its figures are copied" in answer.err
    (run,) = list_runs(runs_root)
    for thread in threading.enumerate():
        if thread.name.startswith("reaper of "):
            thread.join(60)
    assert "rows copied" in run.mirror_log_path.read_text()
    assert list((tmp_path / "tb" / run.run_id).glob("events.out.tfevents.*"))
    kept = run.environment_path.read_text()
    assert '"HF_TOKEN": "[removed]"' in kept and "aB3daB3d" not in kept


def test_mirrors_say_what_is_missing(llmtop: Llmtop, runs_root: Path) -> None:
    make_recorded_run(runs_root, steps=3)
    nowhere = llmtop("mirror", "latest")
    assert nowhere.code == ExitCode.USAGE and "--tensorboard DIR" in nowhere.err
    assert "is no port" in llmtop("serve-metrics", "--port", "70000").err

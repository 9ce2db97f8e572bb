"""Secrets of the environment, of options and of commands stand in no answer, copy or list of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import Script
from llmtop.profiler.export.secrets import REMOVED
from llmtop.profiler.mirrors.targets import Asked
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.wholefile import document
from llmtop.tui.commands import mirror
from tests.recorded import make_recorded_run

SECRET = "hunter2hunter2secret7"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Of a command with a password among its words, and DeepSpeed keys with another."""
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    made = make_recorded_run(tmp_path / "runs", steps=5)
    spec = made.spec()
    command = ("python", "train.py", "--hub-token", SECRET, f"--api-key={SECRET}")
    options = replace(
        spec.options, deepspeed={"comet": {"api_key": SECRET}}, data=f"https://me:{SECRET}@host/x"
    )
    spec = replace(spec, options=options, script=Script(command=command, folder="/", described=True))
    made.spec_path.write_bytes(document(spec))
    with made.log_path(0).open("a") as log:
        log.write("step 1\n")
    return made


@pytest.mark.parametrize(
    "words",
    [
        *(("report", "latest"), ("report", "latest", "--json"), ("report", "latest", "--html", "page.html")),
        *(("compare", "latest", "latest"), ("compare", "latest", "latest", "--json"), ("ls", "--json")),
        *(("doctor",), ("doctor", "--json"), ("attach", "latest", "--plain"), ("resume", "latest")),
    ],
    ids=" ".join,
)
def test_no_answer_holds_a_secret(words: tuple[str, ...], run: RunDir, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmtop.tui.cli", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
        check=False,
    )
    page = tmp_path / "page.html"
    told = done.stdout + done.stderr + (page.read_text() if page.exists() else "")
    assert told and "Traceback" not in told
    if words[0] == "resume":
        return  # its advice is the command to type again, with what was typed
    assert SECRET not in told
    if words[0] == "report":
        assert REMOVED in told


class _Started:
    def __init__(self) -> None:
        self.words: list[str] = []
        self.environment: dict[str, str] = {}

    def __call__(self, words: list[str], **given: object) -> object:
        environment = given["env"]
        assert isinstance(environment, dict)
        self.words, self.environment = words, environment
        raise OSError("not started")


def test_the_address_of_a_mirror_is_no_word_of_its_process(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = _Started()
    monkeypatch.setattr(subprocess, "Popen", started)
    uri = f"http://me:{SECRET}@tracking.example"
    with pytest.raises(OSError, match="not started"):
        mirror.start_mirror(run, Asked(mlflow=uri))
    assert all(SECRET not in word for word in started.words)
    monkeypatch.setattr(os, "environ", started.environment)
    told = started.words[started.words.index("--mlflow") + 1]
    assert mirror._meant(told) == uri


def test_a_variable_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="no variable NOT_THERE_AT_ALL"):
        mirror._meant("env:NOT_THERE_AT_ALL")
    assert mirror._meant("sqlite:///x.db") == "sqlite:///x.db" and mirror._meant(None) is None


def test_what_is_handed_to_trackers_holds_no_secret(run: RunDir) -> None:
    from llmtop.profiler.mirrors.follow import describe

    told = json.dumps(describe(RunDir(run.path), 0, os.environ).options)
    assert SECRET not in told
    # Of a script's options only those that were seen are handed over; of llmtop's own runs all are.
    run.spec_path.write_bytes(document(replace(RunDir(run.path).spec(), script=None)))
    told = json.dumps(describe(RunDir(run.path), 0, os.environ).options)
    assert SECRET not in told and REMOVED in told

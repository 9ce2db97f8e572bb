"""What files say never reaches a terminal as a command, and a stream that takes nothing is an error."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtop.presets.errors import ExitCode
from llmtop.tui.commandline import streams
from tests.cli.conftest import Llmtop
from tests.recorded import make_recorded_run

EVIL = "\x1b[31mEVIL\x1b]0;pwn\x07\x9b\u202e"
CALL = "import sys; from llmtop.tui.cli import main; sys.exit(main())"


def is_harmless(text: str) -> bool:
    return not any(ord(char) in (*streams.CONTROLS, *streams.BIDI) for char in text if char != "\n")


def test_only_newlines_are_left() -> None:
    everything = "".join(map(chr, range(0x2100)))
    assert is_harmless(streams.escaped(everything))
    assert streams.escaped("a\nb é") == "a\nb é"
    assert streams.escaped("\x1b") == "\\u001b"


def test_no_command_passes_escapes_on(llmtop: Llmtop, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": EVIL}))
    plan = llmtop("plan", "--model", str(config))
    assert plan.code == ExitCode.USAGE
    deepspeed = tmp_path / "ds.json"
    deepspeed.write_text(
        json.dumps({EVIL: 1, "zero_optimization": {"stage": 1}, "wandb": {"enabled": True, "project": EVIL}})
    )
    imported = llmtop("import", str(deepspeed))
    presets = tmp_path / "config" / "llmtop" / "presets" / "recipes"
    presets.mkdir(parents=True)
    (presets / f"{EVIL}.toml").write_text("")
    listed = llmtop("presets", "recipes")
    for answer, where in (
        (plan, plan.err),
        (imported, imported.err),
        (imported, imported.out),
        (listed, listed.out),
    ):
        assert "EVIL" in where
        assert is_harmless(answer.out + answer.err)


def test_json_stays_the_same_json(llmtop: Llmtop, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"wandb": {"enabled": True, "project": EVIL}}))
    answer = llmtop("import", str(file), "--json")
    assert is_harmless(answer.out)
    assert answer.json()["options"]["deepspeed"]["wandb"]["project"] == EVIL


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("kind", "shown"), [(Terminal, False), (io.StringIO, True)])
def test_data_is_escaped_on_a_terminal_only(
    kind: type[io.StringIO], shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = kind()
    monkeypatch.setattr(sys, "stdout", stream)
    with streams.safe_streams():
        streams.write_data(f"a\t{EVIL}\n")
        with streams.plain_streams():
            sys.stdout.write("\x1b[0m\n")
    written, drawn, _ = stream.getvalue().split("\n")
    assert (written == f"a\t{EVIL}") is shown
    assert is_harmless(written) is not shown
    assert drawn == "\x1b[0m"


def call(shell_words: str, *words: str, env: dict[str, str]) -> Any:
    """The command line in a process of its own, whose streams the shell has set up."""
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -c "$@" {shell_words}', sys.executable, CALL, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
        check=False,
    )


@pytest.mark.parametrize(
    "words", [("plan", "cpu-demo"), ("ls", "--json"), ("presets",), ("--help",), ("plan", "--help")]
)
@pytest.mark.parametrize(
    ("shell_words", "told"),
    [(">&-", "standard output is closed"), (">/dev/full", "standard output cannot be written")],
)
def test_output_that_goes_nowhere_is_an_error(
    words: tuple[str, ...], shell_words: str, told: str, tmp_path: Path
) -> None:
    done = call(shell_words, *words, env={"LLMTOP_RUNS_DIR": str(tmp_path)})
    assert done.returncode == ExitCode.USAGE
    assert told in done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize("shell_words", ["2>&-", "<&-"])
def test_other_closed_streams_do_no_harm(shell_words: str, tmp_path: Path) -> None:
    done = call(shell_words, "ls", "--json", env={"LLMTOP_RUNS_DIR": str(tmp_path)})
    assert (done.returncode, json.loads(done.stdout)["runs"]) == (ExitCode.DONE, [])
    app = call(shell_words, env={})
    assert app.returncode == ExitCode.USAGE


def test_a_full_error_stream_still_gives_an_exit_code(tmp_path: Path) -> None:
    done = call("2>/dev/full", "ls", env={"LLMTOP_RUNS_DIR": str(tmp_path)})
    assert done.returncode == ExitCode.USAGE


@pytest.mark.parametrize("path", ["a/" * 3000, "n" * 300 + "/x", "loop/x"], ids=["deep", "long", "loop"])
def test_a_path_that_leads_nowhere_is_refused_in_words(
    llmtop: Llmtop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_root: Path, path: str
) -> None:
    run = make_recorded_run(runs_root)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    for words in (
        ("report", f"./{path}"),
        ("report", run.run_id, "--html", path),
        ("export", run.run_id, "--out", path),
        ("compare", run.run_id, f"./{path}"),
        ("import-run", path),
        ("plan", "--model", path),
        ("plan", f"{path}/x.toml"),
    ):
        answer = llmtop(*words)
        assert answer.code != ExitCode.DONE, words
        assert answer.err.startswith("error: ") and len(answer.err) < 40_000, words
    monkeypatch.setenv("LLMTOP_RUNS_DIR", path)
    assert llmtop("report", "latest").code == ExitCode.USAGE


def test_a_current_folder_that_is_gone_is_told(
    llmtop: Llmtop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_root: Path
) -> None:
    run = make_recorded_run(runs_root)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    answer = llmtop("export", run.run_id)
    assert answer.code == ExitCode.USAGE and "the current folder is gone" in answer.err
    assert llmtop("ls").code == llmtop("report", "latest").code == ExitCode.DONE

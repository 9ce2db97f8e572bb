"""The table of commands: help, exit codes, and how mistakes are told."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from llmtop.presets.errors import ExitCode, JobFailedError, OutOfMemoryError, UsageError
from llmtop.tui import cli
from llmtop.tui.commandline import streams
from llmtop.tui.commandline.arguments import CommandParser
from llmtop.tui.commandline.options import ROWS
from llmtop.tui.commands import ls
from tests.cli.conftest import Llmtop


def test_help_names_every_command_and_shows_an_example(llmtop: Llmtop) -> None:
    answer = llmtop("--help")
    assert answer.code == ExitCode.DONE
    assert all(f"\n  {row.name} " in answer.out for row in cli.COMMANDS)
    assert "example:" in answer.out


@pytest.mark.parametrize("name", [row.name for row in cli.COMMANDS])
def test_every_command_has_help_with_its_example(name: str, llmtop: Llmtop) -> None:
    row = next(row for row in cli.COMMANDS if row.name == name)
    answer = llmtop(name, "--help")
    assert answer.code == ExitCode.DONE
    assert row.example in answer.out
    assert row.example.startswith(f"llmtop {name}")
    assert answer.err == ""


def test_the_apps_option_before_a_command_is_told_as_such(llmtop: Llmtop) -> None:
    """The first line of the help has it, so that it is known."""
    answer = llmtop("--read-only", "stop", "latest")
    assert answer.code == ExitCode.USAGE and "unknown" not in answer.err
    assert "--read-only stands before 'stop'" in answer.err and "llmtop attach RUN --read-only" in answer.err
    assert llmtop("--read-only", "--help").out == llmtop("--help").out
    assert llmtop("--read-only", "--version").out == llmtop("--version").out
    answer = llmtop("--read-only", "stpo")
    assert answer.code == ExitCode.USAGE and "did you mean 'llmtop stop'" in answer.err


@pytest.mark.parametrize("row", cli.COMMANDS, ids=lambda row: row.name)
def test_the_usage_line_names_every_option_of_the_command_itself(row: cli.Command) -> None:
    parser = CommandParser(row.name, row.usage, row.help, row.example)
    import_module(f"llmtop.tui.commands.{row.module or row.name}").add_arguments(parser)
    run_options = {option.flag for option in ROWS} | {"--set", "--help"}
    own = {word for word in parser._option_string_actions if word.startswith("--")} - run_options
    own = {word for word in own if not (word.startswith("--no-") and "--" + word[5:] in run_options)}
    if row.name == "demo":
        own.add("--steps")
    assert {word for word in own if word not in row.usage} == set()


@pytest.mark.parametrize("row", cli.COMMANDS, ids=lambda row: row.name)
def test_a_wrong_number_is_told_without_the_name_of_a_function(row: cli.Command) -> None:
    parser = CommandParser(row.name, row.usage, row.help, row.example)
    import_module(f"llmtop.tui.commands.{row.module or row.name}").add_arguments(parser)
    takes = [
        action for action in parser._actions if action.type not in (None, Path) and action.option_strings
    ]
    for action in takes:
        flag = action.option_strings[0]
        with pytest.raises(UsageError) as caught:
            parser.parse([f"{flag}=several"])
        assert f"argument {flag}: 'several' is no " in caught.value.what


def test_thousands_in_a_count_are_told_how_they_are_written(llmtop: Llmtop) -> None:
    answer = llmtop("plan", "--model", "gpt2", "--load", "--context", "32k")
    assert answer.code == ExitCode.USAGE
    assert "'32k' is no whole number: write it out: 32768 or 32000" in answer.err
    none = llmtop("plan", "--model", "gpt2", "--load", "--context", "0")
    assert none.code == ExitCode.USAGE and "whole number from 1" in none.err


def test_help_shows_the_defaults(llmtop: Llmtop) -> None:
    text = " ".join(llmtop("plan", "--help").out.split())
    for words in ("ZeRO stage, 0 to 3 (default: 2)", "(default: 2048", "one forward pass (default: 1)"):
        assert words in text
    assert "(default: off)" in text and "Struct" not in text


def test_version(llmtop: Llmtop) -> None:
    answer = llmtop("--version")
    assert (answer.code, answer.out.split()[0]) == (ExitCode.DONE, "llmtop")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("plam",), "did you mean 'llmtop plan'?"),
        (("ls", "--jsn"), "did you mean '--json'?"),
        (("logs",), "usage: llmtop logs RUN"),
        (("logs", "latest", "--rank", "x"), "'x' is no whole number"),
        (("ls", "latest"), "'latest' is no machine"),
        (("run", "cpu-demo", "--", "python", "train.py"), "exclude each other"),
        (("run", "--steps", "3", "--", "python"), "--steps and a command of your own"),
        (("run", "--"), "no command follows"),
        (("run", "train.py"), "fix: llmtop run -- python train.py"),
        (("run", "train.py", "--epochs", "1"), "fix: llmtop run -- python train.py --epochs 1"),
        (("run", "--detach", "torchrun", "a.py", "-x"), "fix: llmtop run --detach -- torchrun a.py -x"),
        (("run", "cpu-demo", "--stepz", "1"), "did you mean '--steps'?"),
        (("run", "--", "no-such-program"), "there is no program"),
        (("plan", "--", "python"), "nothing may follow"),
        (("plan", "--zero3"), "did you mean '--zero 3'?"),
        (("plan", "--bf16"), "did you mean '--precision bf16'?"),
        (("run", "--load-in-4bit"), "did you mean '--quantization nf4'?"),
        (("ls", "--bf16"), "llmtop ls --help lists the options"),
        (("plan", "--batch-size", "4"), "did you mean '--micro-batch'?"),
        (("plan", "--per_device_train_batch_size", "4"), "did you mean '--micro-batch'?"),
        (("plan", "llama3"), "say which: llama-3.1-405b, llama-3.1-70b, llama-3.1-8b, llama-3.2-1b or"),
        (("plan", "nonsense"), "lists the recipes, `llmtop presets models` the models"),
        (("plan", "gpt2", "--gpu", "a100"), "say which: a100-40gb or a100-80gb; "),
        (("plan", "gpt2", "--quantization", "int4"), "did you mean 'nf4'?"),
        (("run", "cpu-demo", "--detach", "--headless"), "not allowed with"),
        ((), "needs a terminal"),
    ],
)
def test_a_mistake_is_told_without_a_traceback(words: tuple[str, ...], told: str, llmtop: Llmtop) -> None:
    answer = llmtop(*words)
    assert answer.code == ExitCode.USAGE
    assert answer.err.startswith("error: ")
    assert told in answer.err
    assert answer.out == ""


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (JobFailedError("rank 1 was killed", why="by a person", fix="ask"), ExitCode.JOB_FAILED),
        (OutOfMemoryError("no room"), ExitCode.OUT_OF_MEMORY),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (BrokenPipeError(), ExitCode.DONE),
    ],
)
def test_exit_codes(
    raised: BaseException, code: ExitCode, llmtop: Llmtop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_args: object) -> ExitCode:
        raise raised

    monkeypatch.setattr(ls, "run", fail)
    monkeypatch.setattr(streams, "drop", lambda _stream: None)
    answer = llmtop("ls")
    assert answer.code == code
    assert answer.out == ""


def test_a_bug_keeps_its_traceback(llmtop: Llmtop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_args: object) -> ExitCode:
        raise ZeroDivisionError

    monkeypatch.setattr(ls, "run", fail)
    with pytest.raises(ZeroDivisionError):
        llmtop("ls")


def test_a_reader_that_leaves_early_is_no_failure(tmp_path: Path) -> None:
    """`llmtop presets | head -1`, with a pipe that is closed before anything is written."""
    code = "from llmtop.tui.cli import main; import sys; sys.stdin.read(); sys.exit(main(['--help']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate("", timeout=60)
    assert (process.returncode, err) == (ExitCode.DONE, "")

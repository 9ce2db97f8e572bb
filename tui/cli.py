"""The entry point: one table of commands, and nothing imported but the command that was asked for.

Only the standard library is loaded before the command is known, so that `llmtop --help` answers at
once. A command's module declares its arguments (`add_arguments`) and does its work (`run`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from llmtop.tui.commandline import quickly, streams

if TYPE_CHECKING:
    import argparse
    from typing import Protocol

    from llmtop.presets.errors import ExitCode, LlmtopError

    class CommandModule(Protocol):
        """What each module in `tui/commands/` provides."""

        def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

        def run(self, args: argparse.Namespace) -> ExitCode: ...


class Command:
    """One row of the table of commands. To make a class of a form that Python knows would take longer than
    to make all the rows."""

    __slots__ = ("example", "help", "module", "name", "usage")

    def __init__(self, name: str, usage: str, help: str, example: str, module: str = "") -> None:  # noqa: A002
        """`module`: in `tui/commands/`, where that cannot have its name (`import` is a keyword)."""
        self.name, self.usage, self.help, self.example, self.module = name, usage, help, example, module


COMMANDS: tuple[Command, ...] = (
    Command(
        "demo",
        "[--headless] [--steps N]",
        "train the built-in CPU recipe, from prediction to report",
        "llmtop demo --headless",
    ),
    Command(
        "presets",
        "[models|gpus|recipes] [NAME] [--json]",
        "what there is to choose from, and which file each value comes from",
        "llmtop presets recipes",
    ),
    Command(
        "plan",
        "[RECIPE] [OPTIONS] [--explain [WHEN]|--sweep VALUES [--rows N]|--where [--allow WORDS]"
        "|--load [--context N] [--requests N]] [--no-calibration] [--json]",
        "predict memory and time; needs no GPU and no torch",
        "llmtop plan --model llama-3.1-8b --gpu h100-80gb --gpus 8 --zero 3",
    ),
    Command(
        "calibrate",
        "[RECIPE] [OPTIONS] [--json]",
        "measure this machine for a minute at most, so that plan tells its step time",
        "llmtop calibrate cpu-demo",
    ),
    Command(
        "run",
        "[RECIPE] [OPTIONS] [--detach|--headless] [--force] [--tensorboard DIR] [--wandb PROJECT]"
        " [--mlflow URI]\n"
        "       llmtop run [RECIPE] [OPTIONS] --hostfile FILE|--nodes N [--include FILTER|--exclude FILTER]"
        " [--launcher ssh|pdsh|srun] [--env NAME[=VALUE]] [--master-addr ADDRESS] [--remote-python FILE]\n"
        "       llmtop run [--deepspeed-config FILE] [--detach|--headless] -- COMMAND ...",
        "launch a recipe, or a training command of your own; on a terminal the monitor opens",
        "llmtop run cpu-demo --steps 200\n  llmtop run -- torchrun --nproc-per-node 2 train.py",
    ),
    Command(
        "ls",
        "[[USER@]HOST: ...] [--json]",
        "list the runs of this machine, or of others",
        "llmtop ls\n  llmtop ls gpu-1: me@gpu-2:",
    ),
    Command(
        "attach",
        "[RUN|--pid PID] [--plain [--every SECONDS]|--headless] [--read-only]",
        "watch a run, going on or ended, or a process that llmtop has not started",
        "llmtop attach latest",
    ),
    Command(
        "logs",
        "RUN [--rank N] [--tail N] [--follow]",
        "print what the ranks wrote",
        "llmtop logs latest --rank 1 --tail 20 --follow",
    ),
    Command(
        "stacks",
        "RUN [--rank N]",
        "print where each rank of a run stands: its Python stacks",
        "llmtop stacks latest",
    ),
    Command(
        "snapshot",
        "RUN [--what state|stacks|trace|modules] [--step N] [--steps N] [--ranks 0,1] [--with-stacks]"
        " [--dry-run] [--json] [--wait SECONDS]",
        "memory, a trace or modules of a run that goes on; says first what it costs",
        "llmtop snapshot latest --what trace --steps 3",
    ),
    Command(
        "stop",
        "RUN [--save] [--wait SECONDS]",
        "end a run after the step that it is in",
        "llmtop stop latest --save",
    ),
    Command(
        "resume",
        "RUN [KEY=VALUE ...] [--fix N] [--anew] [--force] [--detach|--headless]",
        "go on with a run that has ended, from its newest checkpoint",
        "llmtop resume latest\n  llmtop resume latest steps=1000",
    ),
    Command(
        "set",
        "RUN KEY=VALUE ... [--keep-global-batch yes|no] [--force] [--dry-run] [--json] [--wait SECONDS]",
        "change a live run; says first what is predicted and what it costs",
        "llmtop set latest micro_batch=2 gradient_checkpointing=off",
    ),
    Command(
        "tune",
        "[RECIPE] [OPTIONS] [--fix KEY[=VALUE]] [--allow KEY=V,V] [--trials N] [--minutes M]"
        " [--max-batch|--max-length] [--resume ID] [--dry-run] [--json]",
        "search for the fastest setting that fits, by prediction and real trials",
        "llmtop tune full-zero2 --model qwen2.5-0.5b --fix attention",
    ),
    Command(
        "report",
        "RUN [--json|--html [--out FILE]]",
        "predicted against actual memory, speed, loss and findings",
        "llmtop report latest",
    ),
    Command(
        "compare",
        "RUN RUN [--json|--html FILE]",
        "two runs side by side: options, time, memory, and what really ran",
        "llmtop compare 20261129-1845 latest",
    ),
    Command(
        "export",
        "RUN [--out FILE] [--no-logs] [--snapshots] [--no-parquet] [--force] [--json]",
        "one run as one file, without secrets: record, metrics and a page with plots",
        "llmtop export latest --out run.zip",
    ),
    Command(
        "weights",
        "RUN OUT [--from CHECKPOINT] [--merge|--adapters|--quantized] [--base trained|original]\n"
        "       [--dtype TYPE] [--json]",
        "what a run has trained, as a folder that Transformers or PEFT load",
        "llmtop weights latest my-model",
    ),
    Command(
        "quantize",
        "SOURCE --to FORM [--out PATH] [--force] [--from CHECKPOINT] [--text FILE|--no-perplexity]"
        " [--seconds S] [--window N] [--context N] [--dry-run] [--json]",
        "a model in fewer bits, for llama.cpp or Transformers, and what that has cost",
        "llmtop quantize path/to/Llama-3.1-8B --to gguf:Q8_0\n  llmtop quantize latest --to nf4",
    ),
    Command(
        "import-run",
        "ARCHIVE [--name NAME] [--limit GIB] [--json]",
        "an exported run, to be looked at here",
        "llmtop import-run run.zip",
        module="import_run",
    ),
    Command(
        "serve-metrics",
        "[RUN] [--host HOST] [--port PORT] [--token-file FILE]",
        "the runs that go on, for Prometheus; from this machine alone unless --host says else",
        "llmtop serve-metrics --port 9757",
        module="serve_metrics",
    ),
    Command(
        "mirror",
        "RUN [--tensorboard DIR] [--wandb PROJECT] [--mlflow URI]",
        "copy a run's figures to where others are looked at, until it ends",
        "llmtop mirror latest --tensorboard runs/tb",
    ),
    Command(
        "replay",
        "RUN [--speed N] [--step N] [--read-only]",
        "see a recorded run again, at any pace and from any step",
        "llmtop replay latest --speed 100",
    ),
    Command(
        "delete",
        "RUN [--yes]",
        "remove a run that has ended, with its logs and checkpoints",
        "llmtop delete 20261129-1845",
    ),
    Command(
        "import",
        "DS_JSON [--world-size N] [--json]",
        "read a DeepSpeed configuration: its problems and the equivalent options",
        "llmtop import ds_config.json",
        module="import_config",
    ),
    Command(
        "doctor",
        "[--json]",
        "what this machine has, what is missing and how to mend it",
        "llmtop doctor",
    ),
)

_COLLECT_AFTER = 150_000
"""Objects more than before: more than the app makes until its first screen stands. Python has 700."""


def help_text() -> str:
    """`llmtop --help`, made without argparse because that alone costs more than the whole answer."""
    lines = [
        "Predict, launch and watch LLM training on the GPUs that you have.",
        "",
        "usage: llmtop [--read-only]        the app: runs, plan, monitor; looking on, nothing is changed",
        "       llmtop COMMAND [ARGUMENTS]",
        "       llmtop COMMAND --help       arguments and an example",
        "",
        "commands:",
    ]
    lines += [f"  {row.name:<14}{row.help}" for row in COMMANDS]
    lines += [
        "",
        "example:",
        f"  {COMMANDS[0].example}",
        "",
        "exit codes: 0 done, 1 bug, 2 wrong usage, 3 run predicted not to fit, 4 the job failed,",
        "            5 the job ran out of memory, 130 interrupted; plan ends with 0 whatever its verdict",
    ]
    return "\n".join(lines)


def _version_text() -> str:
    from importlib.metadata import version

    return f"llmtop {version('llmtop-deepspeed')}"


def _find(word: str) -> Command:
    from llmtop.presets.errors import UsageError, nearest

    for row in COMMANDS:
        if row.name == word:
            return row
    kind = "option" if word.startswith("-") else "command"
    guess = nearest(word, [row.name for row in COMMANDS])
    raise UsageError(
        f"unknown {kind} '{word}'",
        fix=f"did you mean 'llmtop {guess}'?" if guess else "llmtop --help lists the commands",
    )


def _run_command(words: Sequence[str]) -> int:
    quickly.import_pathlib()
    row = _find(words[0])
    module = _loaded(row)
    from llmtop.tui.commandline.arguments import CommandParser

    parser = CommandParser(row.name, row.usage, row.help, row.example)
    module.add_arguments(parser)
    return int(module.run(parser.parse(words[1:])))


def _loaded(row: Command) -> CommandModule:
    """The command's module, and all that it imports, as fast as they can be had."""
    quickly.import_msgspec()
    quickly.import_argparse()
    module = cast("CommandModule", quickly.module(f"llmtop.tui.commands.{row.module or row.name}"))
    _collect_again()
    return module


def _collect_again() -> None:
    """What has been imported until now is no garbage and is never looked at, and the rest seldom."""
    if not gc.isenabled():
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER)
        gc.enable()


def _open_app(*, read_only: bool = False) -> int:
    from llmtop.presets.errors import UsageError

    if not streams.can_draw():
        raise UsageError(
            "the app needs a terminal",
            why="standard input or output is not one, or TERM is dumb",
            fix="llmtop --help lists the commands that work without",
        )
    from llmtop.profiler.record.rundir import runs_root
    from llmtop.tui.first.terminal import first_runs

    with streams.plain_streams(), first_runs(runs_root(), read_only=read_only) as first:
        from llmtop.tui.app import run_app

        _collect_again()
        return run_app(start="runs", read_only=read_only, first=first)


_HELP, _VERSION = ("-h", "--help", "help"), ("-V", "--version")
_ABOUT = (*_HELP, *_VERSION)
"""What is answered whatever else is said."""


def _dispatch(words: Sequence[str]) -> int:
    if not words:
        return _open_app()
    if list(words) == ["--read-only"]:
        return _open_app(read_only=True)
    if words[0] == "--read-only":
        words = words[1:]
        if words[0] not in _ABOUT:
            raise _read_only_before(_find(words[0]).name)
    if words[0] in _HELP:
        print(help_text())
        return 0
    if words[0] in _VERSION:
        print(_version_text())
        return 0
    return _run_command(words)


def _read_only_before(word: str) -> LlmtopError:
    from llmtop.presets.errors import UsageError

    return UsageError(
        f"--read-only stands before '{word}'",
        why="alone it opens the app, with keys that change nothing; a command has options of its own",
        fix="llmtop --read-only, or llmtop attach RUN --read-only, or llmtop replay RUN --read-only",
    )


def _user_error(error: Exception) -> LlmtopError | None:
    from llmtop.presets.errors import LlmtopError

    if isinstance(error, OSError):
        from llmtop.tui.commandline.folders import in_words

        return in_words(error)
    return error if isinstance(error, LlmtopError) else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. A bug is not caught, so its traceback shows and the code is 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        leave = quickly.leaver()
        # To look for garbage among what is imported is a tenth of a command's start.
        gc.disable()
        sys.excepthook = streams.tell_bug
    is_open = sys.stdout is not None
    with streams.safe_streams():
        code = _code_of(words, is_open=is_open)
    if argv is None:
        leave(code)
    return code


def _code_of(words: Sequence[str], *, is_open: bool) -> int:
    try:
        if not is_open:
            _refuse_closed_output()
        _require_text(words)
        code = _code_or_help(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        _tell("interrupted")
        return 130
    except BrokenPipeError:
        # The reader of our output has seen enough: `llmtop ls | head -1`.
        streams.drop(sys.stdout)
        return 0
    except Exception as error:
        told = _user_error(error)
        if told is None:
            raise
        _tell(f"error: {told}")
        return int(told.exit_code)


def _tell(text: str) -> None:
    from llmtop.tui.commandline.telling import tell

    tell(text)


def _code_or_help(words: Sequence[str]) -> int:
    try:
        return _dispatch(words)
    except SystemExit as stop:  # argparse's --help
        return stop.code if isinstance(stop.code, int) else 0


def _require_text(words: Sequence[str]) -> None:
    """No record, and no answer in JSON, can hold another word."""
    strange = next((word for word in words if not streams.is_text(word)), None)
    if strange is not None:
        from llmtop.presets.errors import UsageError

        raise UsageError(
            f"'{strange}' is not text in UTF-8",
            why="what llmtop records and prints is text",
            fix="rename the file, or reach it through a link with another name",
        )


def _refuse_closed_output() -> None:
    from llmtop.presets.errors import UsageError

    raise UsageError("standard output is closed", fix="leave it open, or send it to /dev/null")


if __name__ == "__main__":
    sys.exit(main())

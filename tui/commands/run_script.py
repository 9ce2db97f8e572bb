"""`llmtop run -- COMMAND ...`: launch a training command of the user's own, watched as every run is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.dsimport.read import import_config
from llmtop.trainer.script.start import start_script, start_script_over
from llmtop.tui.commandline.arguments import COMMAND
from llmtop.tui.commandline.hostoptions import Chosen
from llmtop.tui.commandline.options import ROWS, SETTINGS
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.launching import watch_as_asked
from llmtop.tui.commands.mirror import asked_of, start_mirror

_CONFIG = "deepspeed_config"
_OF_HOSTS = ("gpu", "gpus", "nodes", "total_gpus")
"""Say which hosts, and what they have."""


def run_script(args: argparse.Namespace, chosen: Chosen | None = None) -> ExitCode:
    """What the words after `--` say, in this folder and environment, or on hosts."""
    _refuse_options(args, () if chosen is None else _OF_HOSTS)
    command = tuple(getattr(args, COMMAND))
    config = getattr(args, _CONFIG, None)
    if config is not None:
        _check_config(Path(config), force=args.force)
    mirrors = asked_of(args)
    launched = start_script(command) if chosen is None else _start_over(chosen, command, args)
    start_mirror(launched, mirrors)
    return watch_as_asked(launched, args)


def _start_over(chosen: Chosen, command: tuple[str, ...], args: argparse.Namespace) -> RunDir:
    from llmtop.trainer.hosts.starters import require_launcher

    require_launcher(chosen.hosts.launcher)
    return start_script_over(command, chosen.hosts, chosen.variables, gpu=getattr(args, "gpu", "auto"))


def _refuse_options(args: argparse.Namespace, taken: Sequence[str]) -> None:
    """A command has its own options: those of llmtop's trainer, but some, would be ignored in silence."""
    given = [row.flag for row in ROWS if row.key not in (_CONFIG, *taken) and hasattr(args, row.key)]
    if args.recipe is not None:
        given.insert(0, f"the recipe {args.recipe}")
    if getattr(args, SETTINGS):
        given.append("--set")
    if given:
        raise UsageError(
            f"run: {', '.join(given)} and a command of your own exclude each other",
            why="the command trains with its own model and options; llmtop reads them from its processes",
            fix="leave them out, or leave out what follows '--'",
        )


def _check_config(path: Path, *, force: bool) -> None:
    """Tell what is wrong with the DeepSpeed configuration that the command will use, before it starts."""
    problems = import_config(path).problems
    for problem in problems:
        tell(f"{'error' if problem.fatal else 'warning'}: {path}: {problem}")
    fatal = [problem for problem in problems if problem.fatal]
    if fatal and not force:
        raise UsageError(
            f"{path}: {fatal[0].key}: {fatal[0].what}", fix=f"{fatal[0].fix}; --force starts it anyway"
        )

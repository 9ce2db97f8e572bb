"""`llmtop mirror`, and the options of `llmtop run` that start it: a run's figures, copied elsewhere."""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.mirrors.targets import Asked, require_packages
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.units import counted
from llmtop.tui.apart import start_apart
from llmtop.tui.commandline.arguments import RUN_HELP
from llmtop.tui.commandline.runs import find_run_here
from llmtop.tui.commandline.telling import tell

_BY_NAME = "env:"
_URI = "LLMTOP_MLFLOW_URI"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    add_mirror_arguments(parser)


def add_mirror_arguments(parser: argparse.ArgumentParser) -> None:
    """Also of `llmtop run`."""
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="event files for TensorBoard")
    parser.add_argument(
        "--wandb", metavar="PROJECT", help="a project of Weights & Biases; WANDB_MODE=offline keeps it here"
    )
    parser.add_argument(
        "--mlflow",
        metavar="URI",
        help="as http://localhost:5000 or sqlite:///mlflow.db;"
        f" {_BY_NAME}NAME: a variable's value, which no list of processes shows",
    )


def asked_of(args: argparse.Namespace) -> Asked:
    """Raises UsageError where a library that is needed is not there."""
    asked = Asked(tensorboard=args.tensorboard, wandb=args.wandb, mlflow=_meant(args.mlflow))
    require_packages(asked)
    return asked


def _meant(uri: str | None) -> str | None:
    if uri is None or not uri.startswith(_BY_NAME):
        return uri
    name = uri.removeprefix(_BY_NAME)
    if name not in os.environ:
        raise UsageError(f"--mlflow {uri}: there is no variable {name}", fix=f"export {name}=URI")
    return os.environ[name]


def run(args: argparse.Namespace) -> ExitCode:
    from llmtop.profiler.mirrors.follow import mirror

    found = find_run_here(args.run, "mirror")
    asked = asked_of(args)
    if not asked.any:
        raise UsageError(
            "mirror: nowhere to copy to", fix="say --tensorboard DIR, --wandb PROJECT or --mlflow URI"
        )
    rows = mirror(found, asked, os.environ)
    tell(f"run {found.run_id} has ended: {counted(rows, 'row')} copied")
    return ExitCode.DONE


def start_mirror(run: RunDir, asked: Asked) -> threading.Thread | None:
    """Follow a run in a process of its own, which outlives the terminal and ends with the run.

    The thread waits for it, so that no zombie stays; None where nothing was asked for.
    """
    if not asked.any:
        return None
    words = ["mirror", str(run.path.resolve())]
    for name in asked.__struct_fields__:
        value = getattr(asked, name)
        if value is not None:
            words += [f"--{name}", str(value.absolute()) if isinstance(value, Path) else value]
    # It may hold a password, and everybody can read the words of a process.
    hidden = {} if asked.mlflow is None else {_URI: asked.mlflow}
    words = [f"{_BY_NAME}{_URI}" if hidden and word == asked.mlflow else word for word in words]
    reaper = start_apart(words, run.mirror_log_path, hidden)
    tell(f"its figures are copied; problems would be in {run.mirror_log_path}")
    return reaper

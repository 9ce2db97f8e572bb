"""`llmtop ls`: the runs, newest first."""

from __future__ import annotations

import argparse
from datetime import datetime

import msgspec

from llmtop.presets.errors import ExitCode
from llmtop.profiler import rundir
from llmtop.profiler.feed import RunReader
from llmtop.tui.commands.output import print_json, table


class RunLine(msgspec.Struct, frozen=True, kw_only=True):
    """One run in the answer of `ls --json`."""

    run_id: str
    name: str
    status: str
    step: int
    steps: int
    """Asked for."""
    world_size: int
    last_loss: float | None
    started: float | None
    """Seconds since the epoch."""
    path: str


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int = 1
    runs: tuple[RunLine, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    lines = tuple(_line(found) for found in rundir.list_runs(rundir.runs_root()))
    if args.json:
        print_json(RunList(runs=lines))
        return ExitCode.DONE
    heads = ("run", "recipe", "status", "step", "loss", "ranks", "started")
    for text in table([heads, *(_cells(line) for line in lines)], right=(3, 4, 5)):
        print(text)
    return ExitCode.DONE


def _line(found: rundir.RunDir) -> RunLine:
    spec = found.spec()
    state = RunReader(found).poll()
    return RunLine(
        run_id=found.run_id,
        name=spec.name,
        status=state.status,
        step=state.steps_finished,
        steps=spec.options.steps,
        world_size=spec.world_size,
        last_loss=state.last_loss,
        started=state.started,
        path=str(found.path),
    )


def _cells(line: RunLine) -> tuple[str, ...]:
    began = "n/a"
    if line.started is not None:
        began = datetime.fromtimestamp(line.started).strftime("%Y-%m-%d %H:%M:%S")
    loss = "n/a" if line.last_loss is None else f"{line.last_loss:.3f}"
    progress = f"{line.step}/{line.steps}"
    return (line.run_id, line.name, line.status, progress, loss, str(line.world_size), began)

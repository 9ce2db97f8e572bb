"""`llmtop ls`: the runs, newest first."""

from __future__ import annotations

import argparse

import msgspec

from llmtop.presets.errors import ExitCode, LlmtopError
from llmtop.profiler.record import bookmark, rundir
from llmtop.profiler.units import NOT_AVAILABLE, format_moment, format_progress
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.output import print_json, table, text_width

_HEADS = ("run", "recipe", "status", "step", "loss", "ranks", "started")
_NUMBERS = ("step", "loss", "ranks")
_LESSER = ("started", "recipe", "ranks", "loss")
"""Left out in this order where the lines would not fit: a run's id says when it began and of what recipe."""


class RunLine(msgspec.Struct, frozen=True, kw_only=True):
    """One run in the answer of `ls --json`; null is not known."""

    run_id: str
    path: str
    status: str
    """As in the monitor, or `unreadable` for a folder that another version made or that is damaged."""
    name: str | None = None
    """The recipe."""
    step: int = 0
    steps: int | None = None
    """Asked for; null for a script, which alone knows."""
    world_size: int | None = None
    last_loss: float | None = None
    started: float | None = None
    """Seconds since the epoch."""
    unsaved: bool = False
    """The newest checkpoint that was asked for could not be written."""
    imported: bool = False
    """It came from an archive: it is only looked at."""


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
    if not lines:
        tell(f"no run in {rundir.runs_root()} yet; start one: llmtop demo")
        return ExitCode.DONE
    for text in _fitting([_HEADS, *(_cells(line) for line in lines)], text_width()):
        print(text)
    return ExitCode.DONE


def _fitting(rows: list[tuple[str, ...]], width: int) -> list[str]:
    """The table without as many of its lesser columns as the width asks for."""
    shown = list(_HEADS)
    for dropped in (None, *_LESSER):
        shown = [head for head in shown if head != dropped]
        cut = [[cell for head, cell in zip(_HEADS, row, strict=True) if head in shown] for row in rows]
        lines = table(cut, right=[at for at, head in enumerate(shown) if head in _NUMBERS])
        if max(map(len, lines)) <= width:
            break
    return lines


def _line(found: rundir.RunDir) -> RunLine:
    try:
        spec = found.spec()
    except LlmtopError as error:
        tell(f"warning: {error}")
        return RunLine(run_id=found.run_id, status="unreadable", path=str(found.path))
    state = bookmark.ended_summary(found)
    if state is None:
        from llmtop.profiler.fleet.part import telling_part
        from llmtop.profiler.record.feed import read_state  # the whole fold

        state = bookmark.summary_of(read_state(telling_part(found)))
    return RunLine(
        run_id=found.run_id,
        name=spec.name,
        steps=spec.steps_planned,
        world_size=spec.world_size,
        status=state.status,
        step=state.steps_finished,
        last_loss=state.last_loss,
        started=state.started,
        path=str(found.path),
        unsaved=state.unsaved,
        imported=found.is_imported,
    )


def _cells(line: RunLine) -> tuple[str, ...]:
    loss = NOT_AVAILABLE if line.last_loss is None else f"{line.last_loss:.3f}"
    progress = NOT_AVAILABLE if line.name is None else format_progress(line.step, line.steps)
    notes = (("not saved", line.unsaved), ("imported", line.imported))
    told = "exported while it ran" if line.status == "exported" else line.status
    status = ", ".join([told, *(note for note, is_so in notes if is_so)])
    return (
        line.run_id,
        _shown(line.name),
        status,
        progress,
        loss,
        _shown(line.world_size),
        format_moment(line.started),
    )


def _shown(value: object) -> str:
    return NOT_AVAILABLE if value is None else str(value)

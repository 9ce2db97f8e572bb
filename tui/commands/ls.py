"""`llmtop ls`: the runs, newest first, of this machine or of others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from llmtop.presets.errors import ExitCode, LlmtopError, UsageError
from llmtop.profiler.record import bookmark, rundir
from llmtop.profiler.record.naming import LATEST
from llmtop.profiler.record.remote import read_remote
from llmtop.profiler.units import NOT_AVAILABLE, format_moment, format_progress
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.output import print_json, table, text_width

_HEADS = ("host", "run", "recipe", "status", "step", "loss", "ranks", "started")
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
    step: int | None = None
    """At which it stands; null while it goes on and has not told from where."""
    steps: int | None = None
    """Asked for; null for a script, which alone knows."""
    world_size: int | None = None
    last_loss: float | None = None
    """Of that step, once its processes have made one; null too where it is not a finite number."""
    started: float | None = None
    """Seconds since the epoch."""
    unsaved: bool = False
    """The newest checkpoint that was asked for could not be written."""
    imported: bool = False
    """It came from an archive: it is only looked at."""
    host: str | None = None
    """The machine that was asked, as ssh is told; null: this one. The path is there."""


class HostAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Another machine that was asked."""

    host: str
    runs_root: str | None = None
    """Its folder of runs; null where it did not answer."""
    problem: str = ""
    """Why it did not; empty where it did."""


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int = 1
    runs: tuple[RunLine, ...]
    hosts: tuple[HostAnswer, ...] = ()
    """Of `ls HOST: ...`, in the order asked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "hosts", nargs="*", metavar="HOST:", help="[USER@]HOST: for the runs of that machine; may be several"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object, in which null is not known: so are step and last_loss of a run that goes"
        " on again, until it has told after which step and has made one",
    )


def run(args: argparse.Namespace) -> ExitCode:
    if args.hosts:
        return _run_elsewhere(_host_names(args.hosts), as_json=args.json)
    lines = tuple(_line(found) for found in rundir.list_runs(rundir.runs_root()))
    if args.json:
        print_json(RunList(runs=lines))
        return ExitCode.DONE
    if not lines:
        tell(f"no run in {rundir.runs_root()} yet; start one: llmtop demo")
        return ExitCode.DONE
    _print(lines, _HEADS[1:])
    return ExitCode.DONE


def _print(lines: Sequence[RunLine], heads: Sequence[str]) -> None:
    for text in _fitting([tuple(heads), *(_cells(line)[-len(heads) :] for line in lines)], text_width()):
        print(text)


def _host_names(refs: list[str]) -> list[str]:
    """Each once. Raises UsageError for what is no machine."""
    for ref in refs:
        host, colon, run_ref = ref.partition(":")
        if not colon and _is_run(ref):
            raise UsageError(
                f"ls: '{ref}' is a run",
                why="ls lists the runs of a machine",
                fix=f"llmtop report {ref}; llmtop ls lists all of this machine",
            )
        if not colon:
            raise UsageError(
                f"ls: '{ref}' is no machine", fix=f"for the runs of another machine: llmtop ls {ref}:"
            )
        if run_ref:
            raise UsageError(
                f"ls: '{ref}' is a run",
                fix=f"llmtop ls {host}: lists all there; llmtop report {ref}",
            )
    return list(dict.fromkeys(ref[:-1] for ref in refs))


def _is_run(ref: str) -> bool:
    """Whether other commands would take it for a run of this machine."""
    ids = [found.run_id for found in rundir.list_runs(rundir.runs_root())]
    return bool(ids) and (ref == LATEST or any(i.startswith(ref) or i.endswith(ref) for i in ids if ref))


def _run_elsewhere(hosts: list[str], *, as_json: bool) -> ExitCode:
    """The code says whether all have answered. Raises LlmtopError where the only one has not."""
    # Most lists are of this machine.
    from tempfile import TemporaryDirectory

    from llmtop.trainer.hosts.following import how_to_try
    from llmtop.trainer.hosts.listing import list_elsewhere

    with TemporaryDirectory(prefix="llmtop-") as folder:
        told = list_elsewhere(hosts, Path(folder))
        lines = tuple(_line(rundir.RunDir(path)) for one in told for path in one.runs)
    silent = [one for one in told if one.problem]
    if as_json:
        answers = (HostAnswer(host=one.host, runs_root=one.root or None, problem=one.problem) for one in told)
        print_json(RunList(runs=lines, hosts=tuple(answers)))
    elif lines:
        _print(lines, _HEADS)
    for one in silent:
        error = LlmtopError(f"{one.host} cannot be asked", why=one.problem, fix=how_to_try(one.host))
        if len(told) == 1 and not as_json:
            raise error
        tell(f"error: {error}")
    for one in told:
        if not one.problem and not one.runs:
            tell(f"no run on {one.host}, in {one.root}")
    return ExitCode.USAGE if silent else ExitCode.DONE


def _fitting(rows: list[tuple[str, ...]], width: int) -> list[str]:
    """The table without as many of its lesser columns as the width asks for."""
    heads = list(rows[0])
    shown = list(heads)
    for dropped in (None, *_LESSER):
        shown = [head for head in shown if head != dropped]
        cut = [[cell for head, cell in zip(heads, row, strict=True) if head in shown] for row in rows]
        lines = table(cut, right=[at for at, head in enumerate(shown) if head in _NUMBERS])
        if max(map(len, lines)) <= width:
            break
    return lines


def _line(found: rundir.RunDir) -> RunLine:
    remote = read_remote(found.path)
    host, path = (remote.host, remote.path) if remote is not None else (None, str(found.path))
    try:
        spec = found.spec()
    except LlmtopError as error:
        where = "" if host is None else f"{host}:{found.run_id}: "
        tell(f"warning: {where}{error}")
        return RunLine(run_id=found.run_id, status="unreadable", path=path, host=host)
    state = bookmark.ended_summary(found)
    if state is None:
        from llmtop.profiler.fleet.part import telling_part
        from llmtop.profiler.record.feed import read_state  # the whole fold

        state = bookmark.summary_of(read_state(telling_part(found), looks_for_left=False))
    return RunLine(
        run_id=found.run_id,
        name=spec.name,
        steps=spec.steps_planned,
        world_size=spec.world_size,
        status=state.status,
        step=state.step,
        last_loss=state.last_loss,
        started=state.started,
        path=path,
        unsaved=state.unsaved,
        imported=found.is_imported,
        host=host,
    )


def _cells(line: RunLine) -> tuple[str, ...]:
    loss = NOT_AVAILABLE if line.last_loss is None else f"{line.last_loss:.3f}"
    progress = NOT_AVAILABLE if line.name is None else format_progress(line.step, line.steps)
    notes = (("not saved", line.unsaved), ("imported", line.imported))
    told = "exported while it ran" if line.status == "exported" else line.status
    status = ", ".join([told, *(note for note, is_so in notes if is_so)])
    return (
        _shown(line.host),
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

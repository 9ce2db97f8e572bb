"""`llmtop snapshot`: memory, a trace, modules or stacks of a run that goes on; says first what it costs."""

from __future__ import annotations

import argparse

from msgspec import Struct

from llmtop.presets.errors import ExitCode, JobFailedError, UsageError
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.record.eventbase import rank_of
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.remote import name_here
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotKind, SnapshotParams, SnapshotTaken
from llmtop.profiler.snapshots.estimate import check_snapshot, estimate_snapshot
from llmtop.profiler.snapshots.reading import Table, read_table, snapshot_lines, taken_for
from llmtop.trainer import control
from llmtop.trainer.stacks import take_stacks
from llmtop.tui.commandline.arguments import RUN_ANYWHERE_HELP
from llmtop.tui.commandline.runs import find_run
from llmtop.tui.commandline.streams import write_data
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.follow import end_in_words
from llmtop.tui.commands.output import print_json

WAIT_SECONDS = 600.0
KINDS = ("state", "stacks", "trace", "modules")


class RankAnswer(Struct, frozen=True, kw_only=True):
    """What one rank wrote."""

    rank: int | None
    taken: SnapshotTaken
    table: Table | None


class Answer(Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    schema_version: int = 1
    run_id: str
    what: str
    status: str
    """`preview`, `under way` or `taken`."""
    expected_bytes: int
    expected_stall_seconds: float
    ranks: tuple[RankAnswer, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_ANYWHERE_HELP)
    parser.add_argument(
        "--what",
        choices=KINDS,
        help="the allocator's blocks, where each rank stands, what ran when, or each module (default: state;"
        " on the CPU kind modules)",
    )
    parser.add_argument("--step", type=int, default=0, metavar="N", help="the first step; default: the next")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="of a trace: how many (default: 1)")
    parser.add_argument("--ranks", type=_ranks, metavar="0,1", help="which ranks write (default: 0)")
    parser.add_argument(
        "--with-stacks", action="store_true", help="of state: which lines of Python allocated what"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what it costs, and take none")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help="how long to wait for it; 0: only ask",
    )


def run(args: argparse.Namespace) -> ExitCode:
    found = find_run(args.run)
    state = read_state(found)
    if args.what == "stacks":
        return _stacks(found, state, args)
    if state.status in ENDED:
        raise UsageError(
            f"run {found.run_id} does nothing that could be looked at",
            why=f"it has ended: {end_in_words(state)}",
            fix=f"what was taken while it ran: llmtop report {name_here(found.path)}",
        )
    asked = SnapshotParams(
        what=args.what or _usual_kind(found, args),
        ranks=args.ranks or (0,),
        step=args.step,
        steps=args.steps,
        with_stacks=args.with_stacks,
    )
    answer = _preview(found, state, asked)
    if args.dry_run:
        if args.json:
            print_json(answer)
        return ExitCode.DONE
    return _take(found, asked, answer, args)


def _usual_kind(found: RunDir, args: argparse.Namespace) -> SnapshotKind:
    """What is taken where none is named; stacks of allocations are of a memory snapshot alone."""
    return "modules" if found.spec().on_cpu and not args.with_stacks else "state"


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of ranks, as 0,1") from None


def _stacks(found: RunDir, state: RunState, args: argparse.Namespace) -> ExitCode:
    if args.json or args.step or args.steps != 1 or args.with_stacks or len(args.ranks or ()) > 1:
        raise UsageError("stacks are of now, as text", fix="give at most one rank: --what stacks --ranks 0")
    taken = take_stacks(found, state, args.ranks[0] if args.ranks else None)
    write_data(taken.text.rstrip("\n") + "\n")
    tell(f"kept in {taken.path}")
    return ExitCode.DONE if any(each.text for each in taken.ranks) else ExitCode.JOB_FAILED


def _preview(found: RunDir, state: RunState, asked: SnapshotParams) -> Answer:
    """Says what it costs. Raises UsageError where it cannot be taken."""
    spec = found.spec()
    world_size = state.world_size if spec.script else None
    check_snapshot(found, spec, asked, last_step=state.present_step or 0, world_size=world_size)
    cost = estimate_snapshot(spec, asked)
    tell(f"{asked.what}: {cost.in_words}")
    return Answer(
        run_id=found.run_id,
        what=asked.what,
        status="preview",
        expected_bytes=cost.kept_bytes,
        expected_stall_seconds=cost.stall_seconds,
    )


def _take(found: RunDir, asked: SnapshotParams, answer: Answer, args: argparse.Namespace) -> ExitCode:
    request_id = control.snapshot(found, asked)
    settled = control.wait_until_settled(found, request_id, args.wait)
    state = read_state(found)
    taken = taken_for(state, request_id)
    if settled is None and state.status not in ENDED:
        if args.json:
            print_json(_answered(found, answer, "under way", taken))
        else:
            print(f"it is under way; llmtop report {name_here(found.path)} will show it")
        return ExitCode.DONE
    if settled is None or settled.answer == "refused":
        why = settled.reason if settled is not None else end_in_words(state)
        kind = JobFailedError if state.status in ENDED else UsageError
        raise kind(f"no snapshot of run {found.run_id} was taken", why=why)
    if args.json:
        print_json(_answered(found, answer, "taken", taken))
    else:
        write_data("\n".join(line for event in taken for line in snapshot_lines(found, event)) + "\n")
    return ExitCode.DONE


def _answered(found: RunDir, answer: Answer, status: str, taken: tuple[SnapshotTaken, ...]) -> Answer:
    return Answer(
        run_id=answer.run_id,
        what=answer.what,
        status=status,
        expected_bytes=answer.expected_bytes,
        expected_stall_seconds=answer.expected_stall_seconds,
        ranks=tuple(
            RankAnswer(rank=rank_of(event.src), taken=event, table=read_table(found, event))
            for event in taken
        ),
    )

"""`llmtop set`: change a live run; says first what is changed how, what is predicted and what it costs."""

from __future__ import annotations

import argparse
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.errors import ExitCode, JobFailedError, LlmtopError, UsageError
from llmtop.profiler.fold.changestate import ChangeRecord
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.hardware.hostmemory import host_memory_bytes
from llmtop.profiler.record.changeevents import KeyChange
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.remote import command_here, name_here
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.units import format_seconds
from llmtop.trainer import control
from llmtop.trainer.change.plan import require_fit, require_words
from llmtop.trainer.script.unchangeable import require_changeable
from llmtop.tui.asking.changetext import Preview, Side, preview_change, preview_lines, sides
from llmtop.tui.commandline.arguments import RUN_ANYWHERE_HELP
from llmtop.tui.commandline.runs import find_run
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.follow import end_in_words
from llmtop.tui.commands.output import print_json

WAIT_SECONDS = 1800.0
"""A relaunch saves, loads and starts up; a step of a large model alone takes a minute."""


class Answer(Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    schema_version: int = 1
    run_id: str
    restage: bool
    changes: tuple[KeyChange, ...]
    now: Side
    then: Side
    lost: tuple[str, ...]
    expected_down_seconds: float | None
    state_bytes: int
    """What is saved and read again for a relaunch."""
    status: str
    """`preview`, `under way` or `applied`."""
    setting: int | None = None
    step: int | None = None
    """The first on the new setting."""
    down_seconds: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_ANYWHERE_HELP)
    parser.add_argument(
        "words", nargs="+", metavar="KEY=VALUE", help="an option of the run, or a key below deepspeed"
    )
    parser.add_argument(
        "--keep-global-batch",
        choices=("yes", "no"),
        default="yes",
        help="adapt grad_accum to micro_batch and gpus, or micro_batch to grad_accum (default: yes)",
    )
    parser.add_argument("--force", action="store_true", help="also when it is predicted not to fit")
    parser.add_argument("--dry-run", action="store_true", help="say what it comes to, and change nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help="how long to wait until it is made; 0: only ask",
    )


def run(args: argparse.Namespace) -> ExitCode:
    found = find_run(args.run, "lines")
    found.require_own("cannot be changed")
    require_changeable(found)
    state = read_state(found)
    if state.status in ENDED:
        raise UsageError(
            f"run {found.run_id} cannot be changed",
            why=f"it has ended: {end_in_words(state)}",
            fix=_instead(found, state, args.words),
        )
    # Not in the record: such a request is a slip of the pen, and no change that the run did not take.
    require_words(args.words)
    asked = control.SetParams(
        words=tuple(args.words), keep_global_batch=args.keep_global_batch == "yes", force=args.force
    )
    try:
        preview = preview_change(found, state, args.words, keep_global_batch=asked.keep_global_batch)
        if not args.json:
            print("\n".join(preview_lines(preview)))
        if not (args.force or args.dry_run):
            require_fit(preview.plan, host_memory_bytes())
    except LlmtopError as error:
        if not args.dry_run:
            _record_refusal(found, replace(asked, refusal=error.in_one_line, refusal_fix=error.fix))
        raise
    if args.dry_run:
        _tell_preview(found, preview, as_json=args.json)
        return ExitCode.DONE
    return _change(found, preview, asked, args)


def _instead(found: RunDir, state: RunState, words: list[str]) -> str:
    """What makes the change after the end: from the newest checkpoint, or anew where nothing was saved."""
    from llmtop.trainer.change.goingon import has_all_steps  # only for a run that has ended

    complete = has_all_steps(state)
    if complete and not state.checkpoints:
        return "start another one: llmtop run"
    steps = ("steps=N",) if complete else ()
    if state.steps_finished and state.last_saved is None:
        return f"{command_here(found.path, 'resume', *words, '--anew')} begins anew with it"
    return f"{command_here(found.path, 'resume', *steps, *words)} goes on with it"


def _record_refusal(found: RunDir, asked: control.SetParams) -> None:
    """So that the supervisor writes what was asked for, and why it was not made."""
    with suppress(LlmtopError):  # the run has just ended: then there is nothing to record, and we say why
        control.change(found, asked)


def _tell_preview(found: RunDir, preview: Preview, *, as_json: bool) -> None:
    if as_json:
        print_json(_answer(found, preview, "preview"))
    else:
        print("nothing was changed: --dry-run")


def _change(found: RunDir, preview: Preview, asked: control.SetParams, args: argparse.Namespace) -> ExitCode:
    request_id = control.change(found, asked)
    answer = control.wait_until_settled(found, request_id, args.wait)
    state = read_state(found)
    record = _record(state, request_id)
    if answer is None and state.status not in ENDED:
        if args.json:
            print_json(_answer(found, preview, "under way", record))
        else:
            print(f"the change is under way; llmtop attach {name_here(found.path)} follows it")
        return ExitCode.DONE
    if answer is None or answer.answer == "refused":
        raise _failure(found, state, record, answer.reason if answer is not None else "")
    if args.json:
        print_json(_answer(found, preview, "applied", record))
    elif record is not None:
        print(_made_words(record))
    return ExitCode.DONE


def _failure(found: RunDir, state: RunState, record: ChangeRecord | None, reason: str) -> LlmtopError:
    what = f"run {found.run_id} was not changed"
    if state.status in ENDED:
        return JobFailedError(what, why=reason or end_in_words(state))
    if record is not None and record.status == "failed":
        return JobFailedError(
            what, why=reason, fix=f"llmtop logs {name_here(found.path)} shows what went wrong"
        )
    fix = record.refused.fix if record is not None and record.refused is not None else ""
    return UsageError(what, why=reason, fix=fix)


def _record(state: RunState, request_id: str) -> ChangeRecord | None:
    for record in reversed(state.changes.records):
        event = record.asked or record.refused
        if event is not None and event.request_id == request_id:
            return record
    return None


def _made_words(record: ChangeRecord) -> str:
    if record.restaged is None:
        return f"changed from step {record.step} on, without a pause"
    parts = ", ".join(
        f"{name.replace('_', ' ')} {format_seconds(seconds)}"
        for name, seconds in record.restaged.stage_seconds.items()
    )
    tell(f"the time went into: {parts}")
    return f"changed from step {record.step} on; down for {format_seconds(record.down_seconds)}"


def _answer(found: RunDir, preview: Preview, status: str, record: ChangeRecord | None = None) -> Answer:
    now, then = sides(preview)
    return Answer(
        run_id=found.run_id,
        restage=preview.plan.restage,
        changes=preview.plan.changes,
        now=now,
        then=then,
        lost=preview.plan.lost,
        expected_down_seconds=preview.price.down_seconds,
        state_bytes=preview.price.state_bytes,
        status=status,
        setting=record.setting if record else None,
        step=record.step if record else None,
        down_seconds=record.down_seconds if record else None,
    )

"""`llmtop report`: predicted against actual for a run that goes on or has ended."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.text import render
from llmtop.tui.commandline.arguments import RUN_ANYWHERE_HELP
from llmtop.tui.commandline.runs import find_run
from llmtop.tui.commands.output import print_json, text_width, without_secrets

_OWN_NAME = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_ANYWHERE_HELP)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON object")
    how.add_argument(
        "--html",
        nargs="?",
        const=_OWN_NAME,
        metavar="FILE",
        help="write one page with plots, which needs no network; by default RUN.html here",
    )
    parser.add_argument("--out", metavar="FILE", help="with --html: where to, as for llmtop export")


def run(args: argparse.Namespace) -> ExitCode:
    _check_out(args)
    found = find_run(args.run)
    if args.html is not None:
        _write_page(found, Path(args.out or args.html or f"{found.run_id}.html"))
        return ExitCode.DONE
    report = without_secrets(build_report(found))
    if args.json:
        print_json(report)
    else:
        print(render(report, text_width()))
    return ExitCode.DONE


def _check_out(args: argparse.Namespace) -> None:
    """Raise UsageError where `--out` says nothing, or something else than `--html`."""
    if args.out is None:
        return
    if args.html is None:
        raise UsageError(
            "--out is of --html", fix=f"llmtop report {args.run} --html --out {args.out}, or leave --out out"
        )
    if args.html != _OWN_NAME:
        raise UsageError(f"--html {args.html} and --out {args.out} both name a file", fix="give one of them")


def _write_page(found: RunDir, path: Path) -> None:
    # Text and JSON wait for none of these.
    import os

    from llmtop.profiler.effects.switches import read_others
    from llmtop.profiler.export.secrets import Scrubber
    from llmtop.profiler.record.feed import read_state
    from llmtop.profiler.report.history import read_history
    from llmtop.profiler.report.page import run_page
    from llmtop.profiler.report.pagedata import page_of
    from llmtop.profiler.report.saving import save_page

    state = read_state(found)
    others = read_others(found, state.host)
    data = page_of(found, state, read_history(found), Scrubber(os.environ), others)
    save_page(path, run_page(data))
    print(f"{path}: open it in a browser")

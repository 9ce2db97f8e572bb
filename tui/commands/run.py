"""`llmtop run`: launch a recipe, then open the monitor, follow it, or leave it to itself."""

from __future__ import annotations

import argparse

from llmtop.presets.errors import ExitCode
from llmtop.profiler.memory.predict import predict_with_suggestions
from llmtop.trainer import launch
from llmtop.tui import options
from llmtop.tui.commands.launching import follow_to_end, require_fit, watch
from llmtop.tui.commands.output import WIDTH
from llmtop.tui.commands.plan_text import caution_lines, input_lines, verdict_line
from llmtop.tui.streams import can_draw
from llmtop.tui.telling import stderr_width, tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run_arguments(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--detach", action="store_true", help="launch and return; prints the run's id")
    how.add_argument(
        "--headless", action="store_true", help="follow on stderr instead of opening the monitor"
    )
    parser.add_argument("--force", action="store_true", help="launch even if predicted not to fit")


def run(args: argparse.Namespace) -> ExitCode:
    spec = options.resolve_run(args)
    prediction = predict_with_suggestions(spec)
    width = stderr_width() or WIDTH
    notes = caution_lines(spec, width, launching=True)
    tell("\n".join((verdict_line(spec, prediction), *notes, *input_lines(spec, width))))
    if not args.force:
        require_fit(spec, prediction)
    launched = launch.start_run(spec, prediction)
    if args.detach:
        print(launched.run_id)
        tell(f"llmtop attach {launched.run_id} watches it, llmtop stop {launched.run_id} ends it")
        return ExitCode.DONE
    if can_draw() and not args.headless:
        return watch(launched)
    print(launched.run_id, flush=True)
    return follow_to_end(launched)

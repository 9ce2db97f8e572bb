"""`llmtop demo`: the built-in CPU recipe, from prediction over training to the report."""

from __future__ import annotations

import argparse

from llmtop.presets.errors import ExitCode
from llmtop.profiler.fold.runstate import ENDED
from llmtop.profiler.memory.predict import predict_with_suggestions
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.text import render
from llmtop.trainer import launch
from llmtop.tui.commandline import options
from llmtop.tui.commandline.streams import can_draw
from llmtop.tui.commandline.telling import stderr_width, tell
from llmtop.tui.commands.follow import follow, require_success
from llmtop.tui.commands.launching import open_monitor, require_fit
from llmtop.tui.commands.output import WIDTH, text_width
from llmtop.tui.commands.plan_text import plan_text

RECIPE = "cpu-demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--headless", action="store_true", help="follow on stderr instead of opening the monitor"
    )
    parser.add_argument("--steps", metavar="N", default=argparse.SUPPRESS, help="optimizer steps")


def run(args: argparse.Namespace) -> ExitCode:
    given = vars(args)
    steps = {"steps": given["steps"]} if "steps" in given else {}
    spec = options.resolve_run(argparse.Namespace(recipe=RECIPE, settings=[], **steps))
    prediction = predict_with_suggestions(spec)
    tell(plan_text(spec, prediction, stderr_width() or WIDTH))
    require_fit(spec, prediction)
    launched = launch.start_run(spec, prediction)
    tell(f"\nrun {launched.run_id} in {launched.path}")
    if can_draw() and not args.headless:
        code = open_monitor(launched, leads_to="the report")
        state = read_state(launched)
        if state.status not in ENDED:
            return code
    else:
        state = follow(launched)
    print(render(build_report(launched), text_width()))
    return require_success(launched, state)

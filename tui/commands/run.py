"""`llmtop run`: launch a recipe, then open the monitor, follow it, or leave it to itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from llmtop.presets.errors import ExitCode
from llmtop.profiler.hardware.hostmemory import host_memory_bytes
from llmtop.profiler.memory.predict import predict_with_suggestions
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import launch
from llmtop.tui.commandline import options
from llmtop.tui.commandline.arguments import COMMAND
from llmtop.tui.commandline.hostoptions import Chosen, add_host_arguments, chosen_hosts, require_ranks_of
from llmtop.tui.commandline.telling import stderr_width, tell
from llmtop.tui.commands.launching import add_how_to_watch, require_fit, watch_as_asked
from llmtop.tui.commands.mirror import add_mirror_arguments, asked_of, start_mirror
from llmtop.tui.commands.output import WIDTH
from llmtop.tui.commands.plan_text import caution_lines, input_lines, verdict_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run_arguments(parser)
    add_how_to_watch(parser)
    parser.add_argument("--force", action="store_true", help="launch even if predicted not to fit")
    add_mirror_arguments(parser)
    add_host_arguments(parser)
    parser.set_defaults(**{COMMAND: ""})


def run(args: argparse.Namespace) -> ExitCode:
    if getattr(args, COMMAND) != "":
        # Most runs are no scripts.
        from llmtop.tui.commands.run_script import run_script

        return run_script(args, chosen_hosts(args))
    mirrors = asked_of(args)
    chosen = chosen_hosts(args)
    if chosen is not None:
        from llmtop.trainer.hosts.starters import require_launcher

        require_launcher(chosen.hosts.launcher)
    spec = options.resolve_run(args)
    if chosen is not None:
        require_ranks_of(spec, chosen.hosts)
    prediction = predict_with_suggestions(spec)
    width = stderr_width() or WIDTH
    notes = caution_lines(spec, width, launching=True)
    limit = host_memory_bytes() if chosen is None and not spec.on_cpu else None
    tell("\n".join((verdict_line(spec, prediction, limit), *notes, *input_lines(spec, width))))
    if not args.force:
        require_fit(spec, prediction, limit)
    launched = launch.start_run(
        spec,
        prediction,
        supervise=None if chosen is None else _over(chosen),
        over_hosts=chosen is not None,
    )
    start_mirror(launched, mirrors)
    return watch_as_asked(launched, args)


def _over(chosen: Chosen) -> Callable[[RunDir], int]:
    """What starts the lead of these hosts."""
    from llmtop.trainer.hosts.start import start_over_hosts

    return lambda run: start_over_hosts(run, chosen.hosts, chosen.variables)

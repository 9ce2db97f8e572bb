"""What commands that start a run share: the refusal of one that will not fit, and watching it."""

from __future__ import annotations

import argparse

from llmtop.presets.errors import DoesNotFitError, ExitCode
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.result import Prediction, is_short, short_words
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.commandline.streams import can_draw, plain_streams
from llmtop.tui.commandline.telling import tell


def require_fit(spec: RunSpec, prediction: Prediction, host_limit_bytes: int | None = None) -> None:
    """Raise DoesNotFitError when the upper bound is above what there is, or the host has less memory than the
    run needs of it. Unknown memory is no refusal."""
    if prediction.fits is not False:
        _require_host_memory(spec, prediction, host_limit_bytes)
        return
    from llmtop.profiler.units import format_bytes
    from llmtop.tui.commandline.options import change_text

    fitting = next((s for s in prediction.suggestions if s.fits), None)
    raise DoesNotFitError(
        f"{spec.name}: predicted not to fit",
        why=f"{'the machine' if spec.on_cpu else 'each ' + spec.gpu.name} needs up to"
        f" {format_bytes(prediction.needed_bytes)}, and there is"
        f" {format_bytes(prediction.device_memory_bytes)}",
        fix=(f"{fitting.words}: {change_text(spec, fitting.change)}; " if fitting else "")
        + "llmtop plan shows every way; --force launches anyway",
    )


def _require_host_memory(spec: RunSpec, prediction: Prediction, limit_bytes: int | None) -> None:
    if is_short(prediction.host_bytes, limit_bytes):
        raise DoesNotFitError(
            f"{spec.name}: predicted not to fit",
            why=short_words(prediction.host_bytes, limit_bytes),
            fix="offload less, or to NVMe: --offload-optimizer, --offload-param; llmtop plan shows every way;"
            " --force launches anyway",
        )


def add_how_to_watch(parser: argparse.ArgumentParser) -> None:
    """The options of a command that has started a run."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--detach", action="store_true", help="launch and return; prints the run's id")
    how.add_argument(
        "--headless", action="store_true", help="follow on stderr instead of opening the monitor"
    )


def watch_as_asked(run: RunDir, args: argparse.Namespace) -> ExitCode:
    """What is left to do for a run that has been started."""
    if args.detach:
        print(run.run_id)
        tell(f"llmtop attach {run.run_id} watches it, llmtop stop {run.run_id} ends it")
        return ExitCode.DONE
    if can_draw() and not args.headless:
        return watch(run)
    print(run.run_id, flush=True)
    return follow_to_end(run)


def open_monitor(run: RunDir, *, read_only: bool = False, leads_to: str = "") -> ExitCode:
    """Show the monitor on `run` until a person leaves it; `leads_to` says what the command shows then."""
    from llmtop.tui.first.terminal import first_picture

    with plain_streams(), first_picture(run, read_only=read_only, leads_to=leads_to) as first:
        from llmtop.tui.app import run_app

        code = run_app(start="monitor", run=run, read_only=read_only, leads_to=leads_to, first=first)
    return ExitCode(code)


def watch(run: RunDir, *, read_only: bool = False) -> ExitCode:
    """Open the monitor on `run`; what the command ends with once the monitor is closed."""
    code = open_monitor(run, read_only=read_only)
    # Only now: the first screen does not wait for it.
    from llmtop.profiler.fleet.part import part_in_lines
    from llmtop.profiler.fold.runstate import ENDED
    from llmtop.profiler.record.feed import read_state
    from llmtop.tui.commands.follow import require_success

    state = read_state(part_in_lines(run))
    return require_success(run, state) if state.status in ENDED else code


def follow_to_end(run: RunDir) -> ExitCode:
    """Follow on stderr; raises when the run failed."""
    from llmtop.tui.commands.follow import follow, require_success
    from llmtop.tui.commands.injob import ending_with_its_job

    with ending_with_its_job(run):
        state = follow(run)
    code = require_success(run, state)
    tell(f"run {run.run_id} {state.status} after step {state.steps_finished}")
    return code

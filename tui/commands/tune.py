"""`llmtop tune`: search for the fastest setting that fits, or for the largest size that does."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from msgspec import Struct

from llmtop.presets.errors import ExitCode, JobFailedError, UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.calibration import with_calibration
from llmtop.profiler.memory.assume import why_untimed
from llmtop.trainer.preflight import preflight
from llmtop.trainer.tune.interrupt import interruptible
from llmtop.trainer.tune.journal import MINUTES, TRIALS, Asked, Line, TuneDir, find_tune, tunes_root
from llmtop.trainer.tune.judged import judged
from llmtop.trainer.tune.nest import Nest
from llmtop.trainer.tune.outcome import found
from llmtop.trainer.tune.pool import pooled, tried_of
from llmtop.trainer.tune.rank import ranked, untried
from llmtop.trainer.tune.search import Search, trial_left
from llmtop.trainer.tune.space import Candidate, Space, choice_of
from llmtop.trainer.tune.trial import trial_spec
from llmtop.tui.commandline import options
from llmtop.tui.commandline.arguments import count, positive
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.output import print_json, text_width
from llmtop.tui.commands.tune_edge import find_edge
from llmtop.tui.commands.tune_text import Progress, found_text, ranked_text, space_text, trials_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run_arguments(parser)
    search = parser.add_argument_group("search")
    search.add_argument(
        "--fix",
        metavar="KEY[=VALUE]",
        action="append",
        default=[],
        help="keep an option as it is, or at a value",
    )
    search.add_argument(
        "--allow",
        metavar="KEY=V,V",
        action="append",
        default=[],
        help="the values that an option may take: zero, offload-optimizer, offload-param, micro-batch,"
        " checkpointing (none, all, every how many layers), attention, liger, buckets, or another"
        " that speed hangs on",
    )
    search.add_argument(
        "--trials",
        metavar="N",
        type=count,
        help=f"runs at most, the first of the starting setting (default: {TRIALS})",
    )
    search.add_argument("--minutes", metavar="M", type=positive, help=f"time at most (default: {MINUTES:g})")
    search.add_argument("--resume", metavar="ID", help="go on with a search: its id, or latest")
    search.add_argument("--dry-run", action="store_true", help="show what would be tried; starts nothing")
    largest = parser.add_mutually_exclusive_group()
    largest.add_argument("--max-batch", action="store_true", help="the largest micro-batch that fits instead")
    largest.add_argument("--max-length", action="store_true", help="the longest sequence that fits instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(args: argparse.Namespace) -> ExitCode:
    if args.resume is not None:
        return _resume(args)
    spec = options.resolve_run(args)
    if args.max_batch or args.max_length:
        return find_edge(spec, args)
    trials, minutes = args.trials or TRIALS, args.minutes or MINUTES
    asked = Asked(spec=spec, fix=tuple(args.fix), allow=tuple(args.allow), trials=trials, minutes=minutes)
    space = judged(asked, here=not args.dry_run, anew=True)
    _require_candidates(space)
    if args.dry_run:
        width = text_width()
        candidates = untried(space.candidates, ())
        print_json(space) if args.json else print(
            f"{space_text(space, width)}\n{_ranked(spec, space, candidates)}"
        )
        return ExitCode.DONE
    preflight(trial_spec(spec))
    tune = TuneDir.create(tunes_root(), asked)
    return _search(tune, asked, space, trials, minutes, as_json=args.json)


def _resume(args: argparse.Namespace) -> ExitCode:
    """Options of the run are those that the search began with."""
    _refuse_other_words(args)
    tune = find_tune(tunes_root(), args.resume)
    asked = tune.asked()
    space = judged(asked, here=True)
    trials, minutes = args.trials or asked.trials, args.minutes or asked.minutes
    if args.dry_run:
        _show(tune, space, trials, as_json=args.json)
        return ExitCode.DONE
    if trial_left(asked.spec, space, tune.ended(), trials, minutes):
        # What has gone since would fail each of them.
        preflight(trial_spec(asked.spec))
    return _search(tune, asked, space, trials, minutes, as_json=args.json)


def _refuse_other_words(args: argparse.Namespace) -> None:
    given = [row.flag for row in options.ROWS if row.key in vars(args)]
    given += ["--set"] * bool(getattr(args, options.SETTINGS))
    given += [f"--{name.replace('_', '-')}" for name in ("fix", "allow", "max_batch", "max_length")
              if getattr(args, name)]  # fmt: skip
    given += [args.recipe] if args.recipe is not None else []
    if given:
        raise UsageError(
            f"--resume takes no {given[0]}",
            why="the search goes on as it was asked for",
            fix=f"llmtop tune --resume {args.resume}, with --trials and --minutes at most",
        )


class Standing(Struct, frozen=True, kw_only=True):
    """The answer of `tune --resume ID --dry-run --json`."""

    schema_version: int = 1
    tune: str
    folder: str
    trials: tuple[Line, ...]
    """A line for each setting that was tried."""
    left: int
    """Trials that may still be made."""
    candidates: tuple[Candidate, ...]
    """What was not tried, the most promising first."""


def _show(tune: TuneDir, space: Space, trials: int, *, as_json: bool) -> None:
    """How far a search is, and what would come next."""
    lines = tune.ended()
    left = max(0, trials - len(lines))
    candidates = tuple(ranked(space.candidates, tried_of(lines, space)))
    if as_json:
        print_json(
            Standing(
                tune=tune.tune_id,
                folder=str(tune.path),
                trials=tuple(pooled(lines)),
                left=left,
                candidates=candidates,
            )
        )
        return
    width = text_width()
    if lines:
        print(trials_text(pooled(lines), width))
    print(f"search {tune.tune_id}: {len(lines)} of {trials} trials made; nothing is started")
    print(_ranked(tune.asked().spec, space, candidates, title="what comes next, by prediction and trials"))


def _ranked(spec: RunSpec, space: Space, candidates: Sequence[Candidate], *, title: str = "") -> str:
    """As a table; without predicted times it is no ranking by speed."""
    timed = any(one.brief.step_seconds is not None for one in candidates)
    why = "" if timed else why_untimed(with_calibration(spec))
    title = title or ("the fastest by prediction" if timed else "what comes first, by how little work it is")
    return ranked_text(space, candidates, text_width(), title=title, why_untimed=why)


def _require_candidates(space: Space) -> None:
    if space.candidates:
        return
    reason = next((f"{one.reason} ({one.why})" if one.why else one.reason for one in space.refused), "")
    raise UsageError(
        "nothing is left to try",
        why=f"{space.too_large:,} combinations are predicted not to fit"
        + (f"; most others are refused: {reason}" if reason else ""),
        fix="fix less, allow more (--allow offload_optimizer=cpu), or see llmtop plan for what makes it fit",
    )


def _search(
    tune: TuneDir, asked: Asked, space: Space, trials: int, minutes: float, *, as_json: bool
) -> ExitCode:
    tell(f"search {tune.tune_id} in {tune.path}\n{space_text(space, text_width())}")
    # A search that is resumed has a best already.
    best = min((line.step_seconds for line in tune.ended() if line.step_seconds), default=None)
    began = time.monotonic()
    try:
        with interruptible(), tune.held(), Nest(trial_spec(asked.spec), tune.path / "nest.log", tell) as nest:
            nest.wait_ready()
            search = Search(tune, asked.spec, space, Progress(space, trials, best), start=nest.start)
            stopped = search.run(trials, minutes, began=began)
    except KeyboardInterrupt:
        tell(f"every trial so far is kept: llmtop tune --resume {tune.tune_id}")
        raise
    result = found(tune, asked.spec, choice_of(asked.spec, space.knobs), stopped)
    if as_json:
        print_json(result)
    else:
        print(found_text(result, text_width()))
    if result.best is None:
        raise JobFailedError(
            f"search {tune.tune_id} measured nothing",
            why=result.trials[-1].reason if result.trials else stopped,
            fix=f"llmtop report {tune.trials_root / result.trials[-1].run}"
            if result.trials and result.trials[-1].run
            else "give it more --minutes",
        )
    return ExitCode.DONE

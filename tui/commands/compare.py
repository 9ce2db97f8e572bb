"""`llmtop compare`: two runs side by side."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from llmtop.presets.errors import ExitCode
from llmtop.presets.spec import Provenance, ValueSource, changed_by
from llmtop.profiler.effects.compare import Change, Comparison, OptionDifference, compare
from llmtop.profiler.effects.comparewords import (
    change_words,
    is_measured,
    no_options_words,
    option_words,
    options_note,
    setting_words,
    side_words,
    spread_words,
)
from llmtop.profiler.record import rundir
from llmtop.profiler.report.memorytext import SMALL_SHARE
from llmtop.tui.commandline.arguments import RUN_ANYWHERE_HELP
from llmtop.tui.commandline.runs import find_run
from llmtop.tui.commands.output import print_json, short_path, table, text_width, without_secrets, wrapped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="RUN", help=RUN_ANYWHERE_HELP)
    parser.add_argument("second", metavar="RUN", help="the run whose change against the first is shown")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON object")
    how.add_argument("--html", type=Path, metavar="FILE", help="write one page, which needs no network")


def run(args: argparse.Namespace) -> ExitCode:
    first, second = (find_run(ref) for ref in (args.first, args.second))
    if args.html is not None:
        _write_page(first, second, args.html)
        return ExitCode.DONE
    found = without_secrets(compare(first, second))
    if args.json:
        print_json(found)
    else:
        print("\n".join(render(found, text_width())))
    return ExitCode.DONE


def _write_page(first: rundir.RunDir, second: rundir.RunDir, path: Path) -> None:
    # Text and JSON wait for none of these.
    import os

    from llmtop.profiler.export.secrets import Scrubber
    from llmtop.profiler.report.comparepage import read_compare_page
    from llmtop.profiler.report.saving import save_page

    save_page(path, read_compare_page(first, second, Scrubber(os.environ)))
    print(f"{path}: open it in a browser")


def render(found: Comparison, width: int) -> Iterator[str]:
    """The comparison in lines of at most `width` columns."""
    yield from _head(found, width)
    yield ""
    yield from _options(found, width)
    yield from _settings(found, width)
    yield ""
    yield from _changes(found)
    yield from _spreads(found, width)
    yield ""
    yield from _ran(found, width)
    if found.unfair:
        yield ""
        yield "Not a fair comparison, because"
        for reason in found.unfair:
            yield from wrapped(reason, "! ", width)


def _head(found: Comparison, width: int) -> Iterator[str]:
    for letter, side in (("A", found.first), ("B", found.second)):
        yield from wrapped(f"{side.run_id}  {side.status.replace('_', ' ')}", f"{letter} is ", width)
        yield from wrapped(side_words(side), "     ", width)


def _options(found: Comparison, width: int) -> Iterator[str]:
    if not found.options:
        yield f"Options: {no_options_words(found)}"
    else:
        yield "Options that differ"
    for option in found.options:
        yield from wrapped(_option(option), "  ", width)
    if note := options_note(found):
        yield from wrapped(note, "  ", width)


def _option(option: OptionDifference) -> str:
    return (
        f"{option.option}: {_sided(option.first, option.first_from)} -> "
        f"{_sided(option.second, option.second_from)}"
    )


def _sided(value: object, found: Provenance | None) -> str:
    words = option_words(value, found)
    return words if found is None else f"{words} ({_source(found)})"


def _source(found: Provenance) -> str:
    """A file says which recipe; the text of an option says nothing that the value does not."""
    if found.source in (ValueSource.RECIPE, ValueSource.DEEPSPEED_CONFIG) and found.detail:
        return f"{found.source} {short_path(found.detail)}"
    return changed_by(found) or str(found.source)


def _settings(found: Comparison, width: int) -> Iterator[str]:
    """Of a run that was changed while it ran: all that it trained on, not only what it ended with."""
    for letter, side in (("A", found.first), ("B", found.second)):
        if len(side.settings) < 2:
            continue
        yield ""
        yield f"Settings of {letter}, in their order"
        for setting in side.settings:
            steps, options, seconds, peak = setting_words(setting)
            yield from wrapped(f"{options}: {seconds} a step, peak {peak}", f"  steps {steps:<14}", width)


def _changes(found: Comparison) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("", "A", "B", "B - A", "")]
    peak = max((c.first or 0, c.second or 0) for c in found.changes if c.name == "peak_bytes")
    shown = (_without_small_percent(change, max(peak)) for change in found.changes if is_measured(change))
    rows += [change_words(change, found.loss_step) for change in shown]
    yield from table(rows, right=(1, 2, 3, 4))


def _spreads(found: Comparison, width: int) -> Iterator[str]:
    yield from wrapped(spread_words(found), "", width)


def _without_small_percent(change: Change, peak_bytes: float) -> Change:
    """A percentage of next to nothing alarms for nothing."""
    size = max(change.first or 0, change.second or 0)
    is_small = change.unit == "bytes" and size < SMALL_SHARE * peak_bytes
    return replace(change, percent=None) if is_small else change


def _ran(found: Comparison, width: int) -> Iterator[str]:
    yield "What ran"
    for row in found.ran:
        if row.first is None and row.second is None:
            continue
        first, second = row.first or "not seen", row.second or "not seen"
        words = f"{first}, in both" if first == second else f"{first} -> {second}"
        yield from wrapped(words, f"  {row.what:<26}", width)
    if all(row.first is None and row.second is None for row in found.ran):
        yield "  nothing recorded yet"

"""The terminal while the toolkit is loaded: the first picture on it, and nothing typed shown or lost.

The toolkit takes longer to load than a record to read, and many seconds where it lies on a network drive.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.hosts import HostDir, read_hosts
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.feeds.monitorfeed import MonitorFeed
from llmtop.tui.feeds.runsfeed import RunsFeed
from llmtop.tui.feeds.view import LogText, RunRow, RunView
from llmtop.tui.first.frame import frame
from llmtop.tui.first.runsframe import OTHER_ROWS, runs_frame
from llmtop.tui.first.written import colours_of, written
from llmtop.tui.looks.look import choices_path, look_of, read_choice

ENTER = "\x1b[?1049h"
"""To the terminal's second screen, as Textual writes it."""
_LEAVE = "\x1b[0m\x1b[?1049l\x1b[?25h"
_HIDE_CURSOR = "\x1b[?25l"
_OTHERWISE = ("COLUMNS", "LINES", "TEXTUAL_DRIVER", "TEXTUAL_COLOR_SYSTEM")
"""With these the toolkit may see another terminal than is seen here."""


_MOST_BYTES = 8 << 20
"""To be read of the runs of a list: a tenth of a second."""


class TakenTerminal:
    """The terminal's second screen without echo, until it is handed over or given back."""

    def __init__(self) -> None:
        self._keys = sys.__stdin__.fileno() if sys.__stdin__ is not None else 0
        self._before = termios.tcgetattr(self._keys)
        self._handler: Any = None
        self.handed_over = False

    def paint(self, picture: str) -> None:
        """Raises OSError where the terminal is gone."""
        self._handler = signal.signal(signal.SIGTERM, _leave)
        termios.tcsetattr(self._keys, termios.TCSANOW, self._quiet())
        _write(ENTER + _HIDE_CURSOR + picture)

    def _quiet(self) -> list[Any]:
        """Keys wait to be read, and none of them stops the program where the screen would stay."""
        quiet = termios.tcgetattr(self._keys)
        quiet[3] &= ~(termios.ECHO | termios.ICANON)
        none = bytes([os.fpathconf(self._keys, "PC_VDISABLE")])
        quiet[6][termios.VSUSP] = quiet[6][termios.VQUIT] = none
        return quiet

    def hand_over(self) -> list[Any]:
        """To who gives it back from now on; how it was before."""
        self.handed_over = True
        return self._before

    def give_back(self) -> None:
        """As it was."""
        signal.signal(signal.SIGTERM, self._handler)
        try:
            _write(_LEAVE)
        finally:
            termios.tcsetattr(self._keys, termios.TCSANOW, self._before)


class First(NamedTuple):
    """What has been read of a run, and the terminal where that is shown already."""

    feed: MonitorFeed
    view: RunView
    log: LogText | None
    terminal: TakenTerminal | None


class FirstRuns(NamedTuple):
    """What has been read of all runs, and the terminal where that is shown already."""

    feed: RunsFeed
    rows: tuple[RunRow, ...]
    terminal: TakenTerminal | None


@contextmanager
def first_runs(root: Path, *, read_only: bool) -> Iterator[FirstRuns]:
    """While this lasts, the app is loaded and takes over; without a terminal where it has to begin by itself.

    Raises UsageError for a theme that is none.
    """
    size, feed = _size(os.environ), RunsFeed(root)
    rows = feed.first(size[1] - OTHER_ROWS, _MOST_BYTES) if size is not None else ()
    first = FirstRuns(feed, rows, None)
    picture = _runs_picture(first, size, read_only) if size is not None and rows else None
    if picture is None:
        yield first
        return
    with _painted(picture) as taken:
        yield first._replace(terminal=taken)


@contextmanager
def first_picture(run: RunDir, *, read_only: bool, leads_to: str) -> Iterator[First | None]:
    """While this lasts, the app is loaded and takes over; None where it has to begin by itself.

    Raises UsageError for a theme that is none.
    """
    first = _read(run)
    picture = None if first is None or first.feed.reading else _picture(first, read_only, leads_to)
    if first is None or picture is None:
        yield first
        return
    with _painted(picture) as taken:
        yield first._replace(terminal=taken)


@contextmanager
def _painted(picture: str) -> Iterator[TakenTerminal]:
    taken = TakenTerminal()
    try:
        taken.paint(picture)
        yield taken
    except BaseException:
        # Whoever had it by then has not come to give it back.
        taken.give_back()
        raise
    if not taken.handed_over:
        taken.give_back()


def _read(run: RunDir) -> First | None:
    """None where another screen opens, or the record cannot be read, which the app tells."""
    feed = MonitorFeed(run)
    try:
        if not isinstance(run, HostDir) and read_hosts(run) is not None:
            return None
        view, log = feed.poll(), feed.poll_log()
    except LlmtopError:
        return None
    return First(feed, view, log, None) if view is not None else None


def _runs_picture(first: FirstRuns, size: tuple[int, int], read_only: bool) -> str | None:
    look, colours = look_of(os.environ, read_choice(choices_path())), colours_of(os.environ)
    if colours is None:
        return None
    rows = runs_frame(first.rows, size, time.time(), read_only=read_only, ascii_alone=look.ascii)
    return written(rows, look, colours) if rows is not None else None


def _picture(first: First, read_only: bool, leads_to: str) -> str | None:
    """What to write; None where this terminal, or what there is to show, is none for it."""
    look = look_of(os.environ, read_choice(choices_path()))
    size, colours = _size(os.environ), colours_of(os.environ)
    if size is None or colours is None:
        return None
    rows = frame(
        first.view,
        first.log,
        size,
        time.time(),
        read_only=read_only,
        leads_to=leads_to,
        ascii_alone=look.ascii,
    )
    return written(rows, look, colours) if rows is not None else None


def _size(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Columns and rows of a terminal that is ours and takes every sign; None: it is not."""
    streams = (sys.__stdin__, sys.__stderr__, sys.__stdout__)
    if any(name in environ for name in _OTHERWISE) or not all(s is not None and s.isatty() for s in streams):
        return None
    keys, _, output = (stream.fileno() for stream in streams if stream is not None)
    try:
        if os.tcgetpgrp(keys) != os.getpgrp():
            return None  # in the background: who touches the terminal from there is stopped
    except OSError:
        pass  # it controls no program, and so stops none
    columns, rows = os.get_terminal_size(output)
    return columns, rows


def _write(text: str) -> None:
    """Where the toolkit writes."""
    if sys.__stderr__ is not None:
        sys.__stderr__.write(text)
        sys.__stderr__.flush()


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)

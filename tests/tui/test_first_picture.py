"""The first pictures of the monitor and of the list of runs: as the app's own, gone without trace."""

from __future__ import annotations

import signal
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.color import Color, ColorSystem
from textual.app import App

from llmtop.profiler.record import feed
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.settingfiles import PREDICTION
from llmtop.tui.app import LlmtopApp
from llmtop.tui.feeds.monitorfeed import MonitorFeed
from llmtop.tui.feeds.owncost import CostMeter
from llmtop.tui.feeds.runsfeed import RunsFeed
from llmtop.tui.first import terminal
from llmtop.tui.first.frame import frame
from llmtop.tui.first.runsframe import runs_frame
from llmtop.tui.first.terminal import ENTER, first_picture, first_runs
from llmtop.tui.first.written import _of_256, _parts, _pieces, _sequence, written
from llmtop.tui.looks.dressing import Dress
from llmtop.tui.looks.glyphs import to_ascii
from llmtop.tui.looks.look import Look
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.plot import LinePlot
from tests.e2e.conftest import LLMTOP, environment
from tests.e2e.terminal import PATIENCE_SECONDS, Terminal
from tests.recorded import make_recorded_run
from tests.tui.eightgpus import run_on_eight
from tests.tui.tuiruns import LiveRun, screen_text, wait_for

LEAVE = b"\x1b[?1049l"
LOOK_SECONDS = 0.02


class Cell(NamedTuple):
    """A blank has no colour but what is behind it."""

    sign: str
    colour: tuple[int, ...]
    background: tuple[int, ...]
    bold: bool


def rows_of(run: RunDir, size: tuple[int, int], *, read_only: bool, ascii_alone: bool) -> list[Content]:
    feed = MonitorFeed(run)
    view, log = feed.poll(), feed.poll_log()
    assert view is not None
    rows = frame(view, log, size, time.time(), read_only=read_only, leads_to="", ascii_alone=ascii_alone)
    assert rows is not None
    return rows


def painted(rows: list[Content], look: Look) -> list[list[Cell]]:
    return [
        [
            Cell(sign, colour if sign != " " else (), background, "1" in style.attributes)
            for text, style in _pieces(row)
            for colour, background in [[_parts(word, look.theme) for word in style[:2]]]
            for sign in (to_ascii(text) if look.ascii else text)
        ]
        for row in rows
    ]


def shown(app: App[Any]) -> list[list[Cell]]:
    found: list[list[Cell]] = []
    for strip in app.screen._compositor.render_strips():
        found.append([])
        for text, style, _ in strip:
            assert style is not None
            colour, background = (tuple(c.get_truecolor()) if c else () for c in (style.color, style.bgcolor))
            found[-1] += [Cell(s, colour if s != " " else (), background, bool(style.bold)) for s in text]
    return found


def alike(one: Cell, other: Cell) -> bool:
    """The toolkit rounds the parts of a colour down when it has turned it into another form and back."""
    parts, others = (*one.colour, *one.background), (*other.colour, *other.background)
    near = len(parts) == len(others) and all(abs(a - b) <= 1 for a, b in zip(parts, others, strict=True))
    return near and one.sign == other.sign and (one.bold == other.bold or one.sign == " ")


CASES = [
    ("cpu", (80, 24), Look(), False),
    ("cpu", (131, 40), Look(theme="light"), True),
    ("eight", (97, 41), Look(ascii=True), False),
    ("eight", (200, 60), Look(theme="colour-blind"), False),
    ("ended", (150, 50), Look(), True),
    ("failed", (80, 24), Look(), False),
]


@pytest.mark.parametrize(("what", "size", "look", "read_only"), CASES)
async def test_it_is_what_the_app_shows_first(
    what: str,
    size: tuple[int, int],
    look: Look,
    read_only: bool,
    live: LiveRun,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LinePlot, "_open", lambda self: None)  # the plots come a moment later
    monkeypatch.setattr(CostMeter, "cost", lambda self: None)
    run = run_on_eight(root) if what == "eight" else live.run
    if what == "ended":
        run = make_recorded_run(root, end="completed", steps=6)
    if what == "failed":
        live.end("failed", "more words than fit in a row " * 4, "look " * 20)
    app = LlmtopApp("monitor", run, root, dress=Dress(look), read_only=read_only)
    async with app.run_test(size=size) as pilot:

        def is_same() -> bool:
            rows = rows_of(run, size, read_only=read_only, ascii_alone=look.ascii)
            pairs = zip(painted(rows, look), shown(app), strict=True)
            return all(
                len(first) == len(second) and all(map(alike, first, second)) for first, second in pairs
            )

        try:
            await wait_for(pilot, is_same, rounds=300)
        except AssertionError:
            rows = painted(rows_of(run, size, read_only=read_only, ascii_alone=look.ascii), look)
            assert "\n".join("".join(cell.sign for cell in row).rstrip() for row in rows) == screen_text(app)
            raise


@pytest.mark.parametrize(
    ("size", "look", "read_only"),
    [
        ((80, 24), Look(), False),
        ((64, 18), Look(theme="light", ascii=True), True),
        ((200, 30), Look(theme="colour-blind"), False),
    ],
)
async def test_the_list_is_what_the_app_shows_first(
    size: tuple[int, int], look: Look, read_only: bool, live: LiveRun, root: Path
) -> None:
    make_recorded_run(root, kind="cuda", end="out_of_memory", steps=6)
    make_recorded_run(root, steps=6)
    app = LlmtopApp("runs", root=root, dress=Dress(look), read_only=read_only)
    async with app.run_test(size=size) as pilot:

        def rows() -> list[list[Cell]]:
            made = runs_frame(
                RunsFeed(root).first(9, 1 << 30),
                size,
                time.time(),
                read_only=read_only,
                ascii_alone=look.ascii,
            )
            assert made is not None
            return painted(made, look)

        def is_same() -> bool:
            return all(
                len(first) == len(second) and all(map(alike, first, second))
                for first, second in zip(rows(), shown(app), strict=True)
            )

        try:
            await wait_for(pilot, is_same, rounds=300)
        except AssertionError:
            told = "\n".join("".join(cell.sign for cell in row).rstrip() for row in rows())
            assert told == screen_text(app)
            raise


class _Taken:
    """In place of a terminal: what is painted on it."""

    handed_over = False
    painted: ClassVar[list[str]] = []

    def paint(self, picture: str) -> None:
        self.painted.append(picture)

    def give_back(self) -> None:
        """There is nothing to give back."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pictures painted, in a terminal of 80 by 24 that is as good as any."""
    monkeypatch.setattr(terminal, "TakenTerminal", _Taken)
    monkeypatch.setattr(terminal, "_size", lambda environ: (80, 24))
    monkeypatch.setattr(_Taken, "painted", [])
    for name in ("NO_COLOR", "COLORTERM", "LLMTOP_THEME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return _Taken.painted


def test_what_was_read_goes_on_to_the_app(live: LiveRun, taken: list[str]) -> None:
    with first_picture(live.run, read_only=False, leads_to="") as first:
        assert first is not None and first.terminal is not None
        assert first.view.state.present_step == 20 and first.log is not None
        assert len(taken) == 1 and "20/60" in taken[0]
        assert first.feed.poll() is None, "it is not read twice"


def test_a_long_record_a_poor_terminal_and_little_room_wait_for_the_app(
    live: LiveRun, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with first_picture(live.run, read_only=False, leads_to="") as first:
        assert first is not None and first.terminal is None
    monkeypatch.setenv("TERM", "xterm-256color")
    for size in ((63, 24), (80, 17), None):
        monkeypatch.setattr(terminal, "_size", lambda environ, size=size: size)
        with first_picture(live.run, read_only=False, leads_to="") as first:
            assert first is not None and first.terminal is None
    monkeypatch.setattr(terminal, "_size", lambda environ: (80, 24))
    live.steps(21, 800)
    with first_picture(live.run, read_only=False, leads_to="") as first:
        assert first is not None and first.terminal is None and first.feed.reading
    assert not taken


def test_a_record_that_cannot_be_read_is_for_the_app_to_tell(live: LiveRun, taken: list[str]) -> None:
    run = RunDir.open(live.run.path)
    (run.path / PREDICTION).write_text("{")
    with first_picture(run, read_only=False, leads_to="") as first:
        assert first is None
    assert not taken


def test_runs_that_were_read_go_on_to_the_app(
    live: LiveRun, root: Path, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with first_runs(root, read_only=False) as first:
        assert first.terminal is not None
        assert [row.run_id for row in first.rows] == [live.run.run_id] and "20/60" in taken[0]
        painted_at = {
            width: runs_frame(first.rows, (width, 9), time.time(), read_only=True, ascii_alone=False)
            for width in range(5, 205, 5)
        }
    assert all(rows is not None for width, rows in painted_at.items() if width >= 60)
    assert {row.cell_length - width for width, rows in painted_at.items() for row in rows or ()} == {0}
    monkeypatch.setattr(terminal, "_size", lambda environ: (80, 3))
    with first_runs(root, read_only=False) as first:
        assert (first.rows, first.terminal) == ((), None), "they have no room"
    monkeypatch.setattr(terminal, "_size", lambda environ: (80, 24))
    monkeypatch.setattr(terminal, "_MOST_BYTES", 9)
    with first_runs(root, read_only=False) as first:
        assert (first.rows, first.terminal) == ((), None), "it takes long to read them"
    assert len(taken) == 1
    *_, rows = first.feed.scan()
    assert [row.run_id for row in rows] == [live.run.run_id]


def test_only_a_bookmark_that_counts_saves_the_reading_of_a_long_run(
    root: Path, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "WORTH_KEEPING_BYTES", 0)
    monkeypatch.setattr(feed, "_PART_EVENTS", 10)
    run = make_recorded_run(root, steps=400)
    (known,) = RunsFeed(root).scan()
    with first_runs(root, read_only=False) as first:
        assert first.rows == known
    monkeypatch.setattr(terminal, "_MOST_BYTES", 20_000)
    with first_runs(root, read_only=False) as first:
        assert first.terminal is not None and first.rows == known
    run.bookmark_path.write_bytes(b"00000000 {}\n")  # as of another version
    with first_runs(root, read_only=False) as first:
        assert (first.rows, first.terminal) == ((), None)
        assert first.feed._readers[run.run_id].behind, "it was not read whole"
    assert len(taken) == 2
    assert [*first.feed.scan()] == [known]


@given(st.tuples(*[st.integers(0, 255)] * 3))
def test_a_terminal_of_256_colours_gets_those_that_rich_takes(colour: tuple[int, int, int]) -> None:
    taken = Color.from_rgb(*colour).downgrade(ColorSystem.EIGHT_BIT).number
    assert _of_256(colour) == f"5;{taken}"


def test_without_colours_there_are_none_and_no_foreign_text_acts() -> None:
    row = Content.assemble(("\x1b[31mred\x07 ", "bold $error on $background"), ("x", "$faint on $background"))
    text = written([row], Look(theme="mono"), 256)
    assert text == "\x1b[1;1H\x1b[0;1m [31mred  \x1b[0;2mx\x1b[0m"
    assert _sequence(_pieces(row)[0][1], Look(), 1 << 24) == "\x1b[0;1;38;2;224;122;122;48;2;16;20;24m"


# --- on a terminal ------------------------------------------------------------------------------------

GATE = """
import pathlib, sys, time
FOLDER = pathlib.Path({folder!r})

class Gate:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("textual", "rich"):
            sys.meta_path.remove(self)
            while not (FOLDER / "opened").exists():
                time.sleep(0.01)
            if (FOLDER / "opened").read_text() == "broken":
                raise RuntimeError("the toolkit is broken")

sys.meta_path.insert(0, Gate())
"""
"""The toolkit is not loaded before a file says so."""


class Gated:
    """`llmtop` in a terminal, before the toolkit is loaded."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._folder = folder
        (folder / "sitecustomize.py").write_text(GATE.format(folder=str(folder)))
        env = {k: v for k, v in environment(folder).items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        env |= {"PYTHONPATH": str(folder), "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
        self.terminal = Terminal([LLMTOP, *words], env)
        self.before = termios.tcgetattr(self.terminal._slave)

    def open(self, how: str) -> None:
        (self._folder / "told").write_text(how)
        (self._folder / "told").rename(self._folder / "opened")

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self.terminal._slave)

    def written(self) -> bytes:
        return bytes(self.terminal._shown)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.written()[-2000:]
            time.sleep(LOOK_SECONDS)


@pytest.fixture
def gated(live: LiveRun, tmp_path: Path, root: Path) -> Iterator[Gated]:
    assert root == tmp_path / "runs"
    found = Gated(tmp_path, "attach", live.run.run_id)
    with found.terminal as terminal:
        for words in ("20/60", "tok/s", "step 20 loss", "Help"):
            terminal.wait_for(words)
        yield found


def test_the_app_takes_over_with_the_keys_typed_meanwhile(gated: Gated) -> None:
    assert not gated.modes()[3] & (termios.ECHO | termios.ICANON)
    first = gated.written()
    gated.terminal.type("?")
    gated.open("as it is")
    gated.terminal.wait_for("Esc closes")  # the help, which the key opens
    gated.terminal.type("qq")
    assert gated.terminal.process.wait(PATIENCE_SECONDS) == 0
    gated.wait_until(lambda: b"The run goes on." in gated.written())
    everything = gated.written()
    assert everything.startswith(first)
    assert everything.count(ENTER.encode()) == 1 and b"\x1b[2J" not in everything, (
        "nothing clears the picture"
    )
    assert gated.modes() == gated.before


def test_the_app_takes_over_the_list_with_the_keys_typed_meanwhile(
    live: LiveRun, tmp_path: Path, root: Path
) -> None:
    assert root == tmp_path / "runs"
    gated = Gated(tmp_path)
    with gated.terminal as terminal:
        for words in ("1, 1 going on", "20/60", "Help"):
            terminal.wait_for(words)
        assert not gated.modes()[3] & (termios.ECHO | termios.ICANON)
        first = gated.written()
        terminal.type("?")
        gated.open("as it is")
        terminal.wait_for("Esc closes")  # the help, which the key opens
        terminal.type("qq")
        assert terminal.process.wait(PATIENCE_SECONDS) == 0
        gated.wait_until(lambda: LEAVE in gated.written())
        everything = gated.written()
        assert everything.startswith(first)
        assert everything.count(ENTER.encode()) == 1 and b"\x1b[2J" not in everything
        assert gated.modes() == gated.before


def _break(gated: Gated) -> None:
    gated.open("broken")


def _interrupt(gated: Gated) -> None:
    gated.terminal.type("\x03")


def _terminate(gated: Gated) -> None:
    gated.terminal.process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [(_break, 1, b"the toolkit is broken"), (_interrupt, 130, b"interrupted"), (_terminate, 143, LEAVE)],
)
def test_whatever_comes_between_gives_the_terminal_back(
    gated: Gated, end: Callable[[Gated], None], code: int, words: bytes
) -> None:
    end(gated)
    assert gated.terminal.process.wait(PATIENCE_SECONDS) == code
    gated.wait_until(lambda: words in gated.written())
    everything = gated.written()
    assert everything.count(LEAVE) == 1 and everything.index(LEAVE) <= everything.index(words)
    assert b"\x1b[?25h" in everything[everything.index(LEAVE) :], "the cursor is there again"
    assert gated.modes() == gated.before

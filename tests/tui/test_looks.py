"""Themes and signs: chosen by environment, key or name, complete on every screen, and remembered."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from llmtop.presets.errors import UsageError
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.looks.dressing import Dress
from llmtop.tui.looks.glyphs import only_ascii, to_ascii
from llmtop.tui.looks.look import THEME_NAMES, Chosen, Look, choices_path, look_of, read_choice, write_choice
from llmtop.tui.looks.theme import THEMES
from llmtop.tui.screens.monitor import all_panels
from llmtop.tui.widgets.panel import Panel
from tests.recorded import make_recorded_run
from tests.tui.tuiruns import MACHINE, LiveRun, screen_text, wait_for, wait_for_text

SMALL = (80, 24)
ASCII = Dress(Look(ascii=True))
MONO = Dress(Look(theme="mono"))


@pytest.mark.parametrize(
    ("environ", "chosen", "look"),
    [
        ({"LANG": "en_US.UTF-8", "TERM": "xterm-256color"}, Chosen(), Look()),
        ({}, Chosen(), Look()),
        ({"LANG": "C.utf8"}, Chosen(), Look()),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, Chosen(), Look(ascii=True)),
        ({"LC_CTYPE": "C.UTF-8"}, Chosen(), Look()),
        ({"LC_ALL": "de_DE.ISO-8859-1", "LANG": "de_DE.UTF-8"}, Chosen(), Look(ascii=True)),
        ({"LANG": "POSIX"}, Chosen(), Look(ascii=True)),
        ({"TERM": "linux", "LANG": "en_US.UTF-8"}, Chosen(), Look(ascii=True)),
        ({"TERM": "vt220"}, Chosen(), Look(theme="mono", ascii=True)),
        ({"NO_COLOR": "1"}, Chosen(theme="light"), Look(theme="mono")),
        ({"NO_COLOR": ""}, Chosen(), Look()),
        ({"NO_COLOR": "1", "LLMTOP_THEME": "light"}, Chosen(), Look(theme="light")),
        ({"LLMTOP_THEME": "mono,ascii"}, Chosen(theme="light", ascii=False), Look(theme="mono", ascii=True)),
        ({"LLMTOP_THEME": "unicode", "TERM": "linux"}, Chosen(), Look()),
        ({}, Chosen(theme="colour-blind", ascii=True), Look(theme="colour-blind", ascii=True)),
        ({}, Chosen(theme="of another version"), Look()),
    ],
)
def test_the_look_follows_environment_choice_and_terminal(
    environ: dict[str, str], chosen: Chosen, look: Look
) -> None:
    assert look_of(environ, chosen) == look


def test_an_unknown_theme_is_told() -> None:
    with pytest.raises(UsageError, match="holds 'lihgt'") as caught:
        look_of({"LLMTOP_THEME": "lihgt"}, Chosen())
    assert "did you mean 'light'?" in str(caught.value)


def test_choices_are_kept_and_damage_is_no_reason_to_fail(tmp_path: Path) -> None:
    path = choices_path({"XDG_CONFIG_HOME": str(tmp_path / "config")})
    assert read_choice(path) == Chosen()
    write_choice(path, Chosen(theme="light"))
    assert read_choice(path) == Chosen(theme="light")
    path.write_text('{"theme": 3')
    assert read_choice(path) == Chosen()


def test_every_theme_is_named_and_says_the_same_things() -> None:
    assert tuple(theme.name for theme in THEMES) == THEME_NAMES
    assert all(set(theme.variables) == set(THEMES[0].variables) for theme in THEMES)


@given(st.text(max_size=40))
def test_ascii_text_is_ascii_and_never_wider(text: str) -> None:
    assert to_ascii(text).isascii()
    for sign in text:
        assert len(to_ascii(sign)) <= max(1, cell_len(sign))


def test_signs_that_are_drawn_keep_their_width() -> None:
    drawn = "━╸╍─┼╋┃·▁▂▃▄▅▆▇█●◌◐✓■✗▸→←⏎⌫…‖▶▾▴┤┬└│╭╮╰╯⠑⠤⣀⢄▔▎▊"
    assert len(to_ascii(drawn)) == len(drawn) == cell_len(drawn)
    assert "?" not in to_ascii(drawn)


def test_a_poor_terminal_is_known_by_its_name() -> None:
    assert only_ascii({"TERM": "vt100", "LANG": "en_US.UTF-8"}) and not only_ascii(
        {"TERM": "screen-256color"}
    )


def app_with(dress: Dress, live: LiveRun, root: Path, start: str = "runs") -> LlmtopApp:
    deeds = Deeds(detect=lambda: MACHINE)
    return LlmtopApp(start, live.run, root, deeds=deeds, dress=dress)  # type: ignore[arg-type]


async def test_every_screen_and_panel_in_ascii(live: LiveRun, root: Path) -> None:
    live.log(0, "naïve café — 漢字 ✨\n")
    app = app_with(ASCII, live, root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        assert (await wait_for_text(pilot, "* running", "20/60")).isascii()
        await pilot.press("enter")
        shown = await wait_for_text(pilot, "1 Memory", "naive cafe")
        assert shown.isascii()
        for name, kind in all_panels():
            await pilot.press(kind.KEY)
            panel = app.screen.query_one(f"#{name}", Panel)
            await wait_for(pilot, lambda panel=panel: panel.zoomed, name)  # type: ignore[misc]
            await pilot.pause()
            assert screen_text(app).isascii(), name
            await pilot.press("escape")
        await pilot.press("question_mark")
        assert (await wait_for_text(pilot, "Esc closes", "Monitor")).isascii()
        await pilot.press("escape", "s")
        assert (await wait_for_text(pilot, "Stop this run?")).isascii()
        await pilot.press("escape", "p")
        assert (await wait_for_text(pilot, "plan", "fits")).isascii()
        await pilot.press("r", "v")
        assert (await wait_for_text(pilot, "REPLAY", "1 Memory")).isascii()


async def test_mono_writes_no_colour_and_shows_the_cursor_in_reverse(live: LiveRun, root: Path) -> None:
    make_recorded_run(root, steps=3)
    app = app_with(MONO, live, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "● running", "✓ completed")
        for keys in ((), ("enter",), ("2",), ("escape", "question_mark"), ("escape", "p")):
            await pilot.press(*keys)
            await pilot.pause()
            styles = [segment.style for strip in app.screen._compositor.render_strips() for segment in strip]
            colours = [c for style in styles if style for c in (style.color, style.bgcolor) if c is not None]
            assert all(colour.is_default for colour in colours), keys
            if not keys:
                reversed_rows = [
                    "".join(s.text for s in strip if s.style is not None and s.style.reverse)
                    for strip in app.screen._compositor.render_strips()
                ]
                assert sum("cpu-demo" in row for row in reversed_rows) == 1


async def test_looks_change_at_once_and_are_remembered(live: LiveRun, root: Path) -> None:
    kept: list[Chosen] = []
    app = app_with(Dress(remember=kept.append), live, root, "monitor")
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "20/60", "━")
        await pilot.press("ctrl+g")
        await wait_for(pilot, lambda: screen_text(app).isascii())
        assert kept == [Chosen(ascii=True)]
        await pilot.press("ctrl+g")
        await wait_for_text(pilot, "━", "Drawn with every sign")
        for name in (*THEME_NAMES[1:], THEME_NAMES[0]):
            await pilot.press("ctrl+t")
            await wait_for_text(pilot, f"Theme: {name}")
            assert app.look.theme == name
    assert kept[-1] == Chosen(theme=THEME_NAMES[0], ascii=False)


async def test_a_choice_that_cannot_be_kept_harms_nothing(live: LiveRun, root: Path) -> None:
    def full(_: Chosen) -> None:
        raise OSError(28, "No space left on device")

    app = app_with(Dress(remember=full), live, root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "● running")
        await pilot.press("ctrl+t")
        await wait_for_text(pilot, "It cannot be remembered")
        assert app.look.theme == THEME_NAMES[1]


async def test_the_palette_finds_what_the_screen_can_do(live: LiveRun, root: Path) -> None:
    app = app_with(Dress(), live, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "● running")
        await pilot.press("ctrl+p")
        await wait_for_text(pilot, "Filter: only runs")
        await pilot.press(*"plan a new")
        await wait_for_text(pilot, "plan a new run")
        await pilot.press("enter")
        if "Reset" not in screen_text(app):
            await pilot.press("enter")
        await wait_for_text(pilot, "Reset")
        await pilot.press("colon", *"theme: mono")
        await wait_for_text(pilot, "theme: mono")
        await pilot.press("enter")
        if app.look.theme != "mono":
            await pilot.press("enter")
        await wait_for(pilot, lambda: app.look.theme == "mono")

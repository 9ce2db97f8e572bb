"""No text of a record, a file or a name reaches a terminal as a command, whatever command or screen shows it.

Every text of a run is planted: in its spec and prediction, in an event of every kind, in what its ranks wrote
and in the folder's documents. Then every command and every panel is asked.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect
from rich.segment import Segment
from textual.color import Color
from textual.strip import Strip

from benchmarks.fuzzing.logs import EVENTS
from benchmarks.fuzzing.making import Maker, Pairs, dumped
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.app import LlmtopApp
from llmtop.tui.cli import main
from llmtop.tui.commandline import streams
from llmtop.tui.first.written import written
from llmtop.tui.keys import MONITOR_KEYS
from llmtop.tui.looks.filters import HarmlessFilter
from llmtop.tui.looks.look import Look
from llmtop.tui.screens.runs import RunsScreen
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import harmless
from tests.recorded import BEGAN, make_recorded_run
from tests.tui.tuiruns import wait_for, wait_for_text

MARK = "EVIL"
EVIL = f"\x1b[2J\x1b[31m{MARK}\x1b]0;title\x07\x1b]52;c;cGF5bG9hZA==\x07\x9b2J\x90q\x1b\\\u202e\x08\r\x7f"
ACTED_ON = {*streams.CONTROLS, *streams.BIDI} - {ord("\n")}


def acted_on(text: str) -> set[str]:
    return {character for character in text if ord(character) in ACTED_ON}


class Planting(Maker):
    """Values of a type with one text in every place that takes any."""

    def __init__(self, text: str) -> None:
        super().__init__(random.Random(0))
        self.text = text

    def _plain(self, kind: inspect.Type) -> Any:
        return self.text if isinstance(kind, inspect.StrType) else super()._plain(kind)

    def anything(self, depth: int = 3) -> Any:
        return self.text

    def _whole(self, kind: inspect.IntType) -> int:
        return 1

    def _number(self, kind: inspect.FloatType) -> float:
        return 1.0


def planted_run(root: Path, text: str) -> RunDir:
    run = make_recorded_run(root, kind="cuda", steps=4, end="out_of_memory")
    # Events of changes name it.
    run.add_setting(run.spec(), run.prediction(), {})
    maker = Planting(text)
    assert isinstance(EVENTS, inspect.UnionType)
    for source in ("supervisor", "hardware", "rank0"):
        with run.events_path(source).open("ab") as log:
            for kind in EVENTS.types:
                stamps = {"v": 1, "t": BEGAN + 60, "m": 1.0, "src": source}
                value = [(key, item) for key, item in maker.of(kind) if key not in stamps]
                log.write(dumped(Pairs([*stamps.items(), *value])).encode() + b"\n")
    for path in (*run.path.rglob("spec.json"), *run.path.rglob("prediction.json")):
        path.write_text(json.dumps(_with_words(json.loads(path.read_text()), text)))
    RunDir(run.path).prediction(1)
    for rank in range(2):
        with run.log_path(rank).open("a") as output:
            output.write(f"{text}\nERROR: {text}\n")
    run.environment_path.write_text(json.dumps({"packages": {text: text}, "variables": {text: text}}))
    return run


def _with_words(value: Any, text: str, key: str = "") -> Any:
    """Names and words for people; not what is one of a few, as the name of a moment is."""
    if isinstance(value, dict):
        return {name: _with_words(item, text, name) for name, item in value.items()}
    if isinstance(value, list):
        return [item if key == "moments" else _with_words(item, text, key) for item in value]
    words = ("name", "model_source", "data", "detail", "text", "assumptions", "weights_dir", "description")
    return text if isinstance(value, str) and key in words else value


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """What a command writes to a terminal."""
    with monkeypatch.context() as patched:
        out, err = Terminal(), Terminal()
        patched.setattr(sys, "stdout", out)
        patched.setattr(sys, "stderr", err)
        main(list(words))
    return out.getvalue() + err.getvalue()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


COMMANDS = (
    *(("ls",), ("ls", "--json"), ("report", "latest"), ("report", "latest", "--json"), ("logs", "latest")),
    *(
        ("attach", "latest", "--plain"),
        ("attach", "latest", "--headless"),
        ("stacks", "latest"),
        ("stop", "latest"),
    ),
    *(("resume", "latest"), ("set", "latest", "micro_batch=2"), ("snapshot", "latest"), ("export", "latest")),
    *(
        ("compare", "latest", "latest"),
        ("compare", "latest", "latest", "--json"),
        ("resume", "latest", "--fix", "1"),
    ),
    *(("report", "latest", "--html", "page.html"), ("logs", "latest", "--rank", "1"), ("delete", "latest")),
    *(
        (EVIL,),
        ("logs", EVIL),
        ("report", f"./{EVIL}"),
        ("plan", EVIL),
        ("plan", "--model", f"./{EVIL}.json"),
    ),
    *(
        ("plan", "cpu-demo", "--set", EVIL),
        ("import", EVIL),
        ("presets", "models", EVIL),
        ("plan", f"--{EVIL}"),
    ),
    *(
        ("plan", "cpu-demo", "--data", f"/{EVIL}"),
        ("import-run", EVIL),
        ("run", "--", EVIL),
        ("presets", EVIL),
    ),
    *(("plan", "cpu-demo", "--sweep", EVIL), ("tune", "cpu-demo", "--dry-run", "--fix", EVIL)),
)


def test_no_command_hands_on_what_a_record_holds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted_run(root, EVIL)
    named = 0
    for words in COMMANDS:
        text = shown(monkeypatch, *words)
        assert text.strip(), words
        assert acted_on(text) == set(), words
        named += MARK in text
    assert named > len(COMMANDS) // 2, "the planted text is shown, and was cleaned"


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(
        st.sampled_from("\x1b[]0;P\x07\x9b\x90\\?hl2J\r\b\u202e\u200fm31c,"), min_size=1, max_size=30
    )
)
def test_whatever_the_text(text: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in root.glob("*"):
        for file in sorted(run.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        run.rmdir()
    planted_run(root, text)
    for words in (("ls",), ("report", "latest"), ("logs", "latest"), ("attach", "latest", "--plain")):
        assert acted_on(shown(monkeypatch, *words)) == set()
    assert acted_on(harmless(text)) == set()


def test_a_traceback_is_cleaned_too(tmp_path: Path) -> None:
    code = "import sys; from llmtop.tui.cli import main\nimport llmtop.tui.cli as c\n"
    code += f"def broken(words): raise ValueError({EVIL!r})\nc._dispatch = broken\n"
    code += "sys.argv = ['llmtop', 'ls']; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and "Traceback" in done.stderr and MARK in done.stderr
    assert acted_on(done.stderr) == set()


def test_words_and_folders_that_are_no_text_are_refused(root: Path) -> None:
    call = [sys.executable, "-m", "llmtop.tui.cli"]
    for words, variables in (
        ([b"plan", b"cpu-demo", b"--json", b"--data", b"/tmp/\xff"], {}),
        ([b"export", b"latest", b"--out", b"\xff"], {}),
        ([b"ls", b"--json"], {b"LLMTOP_RUNS_DIR": os.fsencode(root) + b"/\xff"}),
    ):
        done = subprocess.run(
            [*map(os.fsencode, call), *words],
            capture_output=True,
            env={**os.environb, **variables},
            timeout=120,
            check=False,
        )
        assert done.returncode == 2 and b"text" in done.stderr and b"Traceback" not in done.stderr


# --- the app -----------------------------------------------------------------------------------------


def test_the_last_filter_lets_nothing_through() -> None:
    everything = "".join(map(chr, range(0x2100)))
    made = HarmlessFilter().apply([Segment(everything), Segment("plain")], Color(0, 0, 0))
    assert acted_on("".join(segment.text for segment in made)) == set()
    assert Strip(made).cell_length >= len("plain") and made[1].text == "plain"


@pytest.mark.parametrize("theme", ["calm", "mono"])
def test_the_picture_before_the_app_lets_nothing_through(theme: str) -> None:
    everything = "".join(map(chr, range(0x2100)))
    rows = [Content(one, ((0, len(one), "$foreground on $background"),)) for one in (everything, EVIL)]
    text = written(rows, Look(theme=theme), 256)
    assert MARK in text
    assert acted_on(re.sub(r"\x1b\[[0-9;]*[Hm]", "", text)) == set()


async def test_no_screen_hands_on_what_a_record_holds(root: Path) -> None:
    run = planted_run(root, EVIL)
    app = LlmtopApp(start="monitor", run=RunDir.open(run.path), root=root)
    async with app.run_test(size=(160, 50)) as pilot:
        await wait_for_text(pilot, "step")
        looking = [
            key.key for key in MONITOR_KEYS if not key.changes and len(key.key) == 1 and key.key != "q"
        ]
        for key in looking:
            await pilot.press(key)
            await pilot.pause()
            assert drawn_acts(app) == set(), key
        app.notify(EVIL, title=EVIL, markup=False)
        await pilot.pause()
        assert drawn_acts(app) == set()
        app.action_runs()
        await wait_for(pilot, lambda: isinstance(app.screen, RunsScreen), "the list of runs")
        await wait_for_text(pilot, run.run_id[-4:], "1/4")
        assert drawn_acts(app) == set()


def drawn_acts(app: LlmtopApp) -> set[str]:
    strips = [strip for strip in app.screen._compositor.render_strips()]
    segments = [segment for strip in strips for segment in strip]
    return acted_on("".join(segment.text for segment in _filtered(app, segments) if not segment.control))


def _filtered(app: LlmtopApp, segments: list[Segment]) -> list[Segment]:
    for one in app.get_line_filters():
        segments = one.apply(segments, Color(0, 0, 0))
    return segments


def test_a_struct_of_every_kind_is_planted(tmp_path: Path) -> None:
    """The search above has something to find."""
    run = planted_run(tmp_path, EVIL)
    lines = run.events_path("supervisor").read_bytes().splitlines()
    kinds = {msgspec.json.decode(line)["kind"] for line in lines}
    assert isinstance(EVENTS, inspect.UnionType)
    assert len(kinds) >= len(EVENTS.types)

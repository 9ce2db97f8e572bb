"""The app in a real tmux of 80 by 24, by keys alone: plan, launch, monitor, change, stop, replay, compare."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtop.tui.widgets.planrows import HELP
from tests.e2e.conftest import LLMTOP, environment
from tests.recorded import make_recorded_run

PATIENCE_SECONDS = 120.0
LOOK_SECONDS = 0.1

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


class Tmux:
    """A server of its own, so that it meets neither the configuration nor the sessions of a person."""

    def __init__(self, folder: Path, env: dict[str, str], *, unicode: bool) -> None:
        self._words = ["tmux", *(["-u"] if unicode else []), "-f", "/dev/null", "-S", str(folder / "tmux")]
        # Inside another tmux ours would ask that one.
        self._env = {name: value for name, value in env.items() if name not in ("TMUX", "TMUX_PANE")}

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._words, *words], env=self._env, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )

    def start(self, *command: str) -> None:
        done = self.call("new-session", "-d", "-s", "llmtop", "-x", "80", "-y", "24", *command)
        assert done.returncode == 0, done.stderr

    def type(self, *keys: str) -> None:
        assert self.call("send-keys", "-t", "llmtop", *keys).returncode == 0

    def shown(self) -> str:
        return self.call("capture-pane", "-p", "-t", "llmtop").stdout

    def wait_for(self, *words: str) -> str:
        """Until all the words stand on the screen; the screen then."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            shown = self.shown()
            if all(word in shown for word in words):
                return shown
            time.sleep(LOOK_SECONDS)
        raise AssertionError(f"never came: {words}\n{self.shown()}")

    def wait_for_end(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.call("has-session", "-t", "llmtop").returncode == 0:
            assert time.monotonic() < deadline, self.shown()
            time.sleep(LOOK_SECONDS)


@pytest.fixture(params=["en_US.UTF-8", "C"])
def tmux(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tmux]:
    """With one finished run in its folder; in a locale with every sign, and in one with ASCII alone."""
    make_recorded_run(tmp_path / "runs", steps=20)
    env = {k: v for k, v in environment(tmp_path).items() if not k.startswith("LC_")}
    env |= {"LANG": request.param, "TERM": "xterm-256color"}
    env = {name: value for name, value in env.items() if name not in ("NO_COLOR", "LLMTOP_THEME")}
    found = Tmux(tmp_path, env, unicode=request.param != "C")
    yield found
    found.call("kill-server")


def test_runs_monitor_and_replay_by_keys_alone(tmux: Tmux) -> None:
    tmux.start(LLMTOP)
    shown = tmux.wait_for("llmtop  runs  1, 0 going on", "completed", "20/20", "Help")
    assert len(shown.rstrip("\n").split("\n")) <= 24
    tmux.type("Enter")
    tmux.wait_for("COMPLETED: all ranks finished all steps", "1 Memory", "8 Log")
    tmux.type("2")
    tmux.wait_for("2 Predicted/actual", "unexplained", "parameters")
    tmux.type("Escape")
    tmux.wait_for("1 Memory", "8 Log")
    tmux.type("r")
    tmux.wait_for("llmtop  runs", "20/20")
    tmux.type("v")
    tmux.wait_for("REPLAY 10x", "1 Memory")
    tmux.type("t")
    tmux.wait_for("Go to a step")
    tmux.type("1", "2", "Enter")
    tmux.wait_for("step 12/20", "REPLAY")
    tmux.type(",")
    tmux.wait_for("step 11/20")
    tmux.type(">")
    tmux.wait_for("COMPLETED: all ranks finished all steps", "REPLAY")
    tmux.type("?")
    tmux.wait_for("play, or hold", "Esc closes")
    tmux.type("Escape")
    # Escape and what follows at once would be one key, as with Alt.
    tmux.wait_for("COMPLETED")
    tmux.type("q")
    tmux.wait_for_end()


@pytest.mark.slow
@pytest.mark.parametrize("tmux", ["en_US.UTF-8"], indirect=True)
def test_from_the_plan_through_a_real_run_to_a_comparison(tmux: Tmux) -> None:
    tmux.start(LLMTOP)
    tmux.wait_for("llmtop  runs  1, 0 going on", "Help")
    tmux.type("p")
    tmux.wait_for("llmtop  plan  tiny-llama-cpu  2 x cpu", "fits")
    # More steps than there is patience for: it is ended by hand.
    tmux.type(*["Down"] * list(HELP).index("steps"), "Right", "Right")
    tmux.wait_for("1 edited")
    tmux.type("L")
    tmux.wait_for("Launch this run?", "llmtop run cpu-demo --steps 480", '"stage": 2')
    tmux.type("Enter")
    tmux.wait_for("0 Start-up", "import torch")
    tmux.wait_for("4 Steps", "a step", "running")
    tmux.type("c")
    tmux.wait_for("Change this run")
    tmux.type(*"micro_batch=4")
    tmux.wait_for("8 -> 4", "between two steps")
    tmux.type("Enter")
    tmux.wait_for("Change this run so?")
    tmux.type("Enter")
    tmux.wait_for("The change is under way.")
    tmux.type("e")
    tmux.wait_for("e Changes", "micro_batch 8 -> 4", "without a pause", "setting 1 in force")
    tmux.type("e")
    tmux.wait_for("1 Memory")
    tmux.type("s")
    tmux.wait_for("Stop this run?")
    tmux.type("n")
    tmux.wait_for("STOPPED:", "1 Memory")
    tmux.type("r")
    tmux.wait_for("llmtop  runs  2, 0 going on", "stopped")
    # The newest run is the first; the cursor is still on the other one.
    tmux.type("Home", "v")
    tmux.wait_for("REPLAY 10x")
    tmux.type("t")
    tmux.wait_for("Go to a step")
    tmux.type("2", "Enter")
    tmux.wait_for("step 2/480", "REPLAY")
    tmux.type("Escape")
    tmux.wait_for("llmtop  runs  2")
    tmux.type("Home", "Space", "Down", "c")
    tmux.wait_for("Compare", "Options that differ", "Esc closes")
    tmux.type("q")
    tmux.wait_for("llmtop  runs  2")
    tmux.type("q")
    tmux.wait_for_end()


def test_ascii_alone_where_the_locale_has_no_more(tmux: Tmux, request: pytest.FixtureRequest) -> None:
    tmux.start(LLMTOP)
    tmux.wait_for("llmtop  runs  1", "Help")
    tmux.type("Enter")
    shown = tmux.wait_for("COMPLETED", "1 Memory")
    assert shown.isascii() == ("[C]" in request.node.name)
    # A tmux without UTF-8 puts an underscore in the place of each sign that it cannot show.
    assert "____" not in shown
    tmux.type("q")
    tmux.wait_for_end()

"""An app that no signal tells of the end of its terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

PATIENCE_SECONDS = 180.0


@pytest.mark.parametrize(
    ("inherited", "code"), [(signal.SIG_DFL, -signal.SIGHUP), (signal.SIG_IGN, 128 + signal.SIGHUP)]
)
def test_the_app_leaves_with_a_terminal_that_is_not_its_controlling_one(
    tmp_path: Path, inherited: signal.Handlers, code: int
) -> None:
    master, slave = pty.openpty()
    app = subprocess.Popen(
        [sys.executable, "-m", "llmtop.tui.cli"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm-256color", "LLMTOP_RUNS_DIR": str(tmp_path)},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, inherited),  # `nohup` has it ignored
    )
    os.close(slave)
    try:
        shown, deadline = b"", time.monotonic() + PATIENCE_SECONDS
        while b"\x1b[?1049h" not in shown and time.monotonic() < deadline:
            if select.select([master], [], [], 1.0)[0]:
                shown += os.read(master, 65536)
        assert b"\x1b[?1049h" in shown, shown[-500:]
        os.close(master)
        assert app.wait(PATIENCE_SECONDS) == code
    finally:
        if app.poll() is None:
            app.kill()
            app.wait()


def test_an_app_that_is_told_to_end_gives_the_terminal_back(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    app = subprocess.Popen(
        [sys.executable, "-m", "llmtop.tui.cli"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm-256color", "LLMTOP_RUNS_DIR": str(tmp_path)},
        start_new_session=True,
    )
    try:
        shown, asked, deadline = b"", False, time.monotonic() + PATIENCE_SECONDS
        while app.poll() is None and time.monotonic() < deadline:
            if select.select([master], [], [], 0.1)[0]:
                shown += os.read(master, 65536)
            if b"Help" in shown and not asked:
                asked = True
                app.terminate()
        assert app.poll() == 128 + signal.SIGTERM
        while select.select([master], [], [], 0.1)[0]:
            shown += os.read(master, 65536)
        assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1
        assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
        assert termios.tcgetattr(slave) == before
    finally:
        if app.poll() is None:
            app.kill()
            app.wait()
        os.close(slave)
        os.close(master)

"""What a measured program has started ends with it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.ui_terminal import BenchTerminal

GIVE_UP_SECONDS = 30.0
LEAVES_A_SERVER = """
import subprocess, sys, time
server = subprocess.Popen(["sleep", "600"], start_new_session=True)
open(sys.argv[1], "w").write(str(server.pid))
print("it is up", flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_server_in_a_session_of_its_own_ends_too(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with BenchTerminal([sys.executable, "-c", LEAVES_A_SERVER, str(file)], dict(os.environ)) as terminal:
        terminal.wait_for("it is up", give_up=GIVE_UP_SECONDS)
        server = int(file.read_text())
        assert is_alive(server) and is_alive(terminal.process.pid)
    end = time.monotonic() + GIVE_UP_SECONDS
    while is_alive(server):
        assert time.monotonic() < end
    assert not is_alive(terminal.process.pid)


def test_only_what_it_started_is_ended(tmp_path: Path) -> None:
    with BenchTerminal(["sleep", "600"], dict(os.environ)) as other:
        with BenchTerminal(["sleep", "600"], dict(os.environ)):
            pass
        assert is_alive(other.process.pid)
    assert not is_alive(other.process.pid)


def test_words_that_never_come_are_told(tmp_path: Path) -> None:
    with BenchTerminal(["echo", "something else"], dict(os.environ)) as terminal:
        terminal.wait_for("something else", give_up=GIVE_UP_SECONDS)
        with pytest.raises(TimeoutError, match="something else"):
            terminal.wait_for("never", give_up=0.5)

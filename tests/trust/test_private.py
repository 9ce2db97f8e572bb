"""What a run leaves is its owner's alone, whatever the umask; and nothing leaves the machine by itself."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtop.profiler.export.archive import export_run
from llmtop.profiler.export.importing import import_run
from llmtop.profiler.record.feed import open_stream
from llmtop.trainer import control
from llmtop.trainer.change.livefile import LiveRequest, ask_ranks
from llmtop.trainer.tune.journal import Asked, TuneDir
from tests.recorded import make_recorded_run
from tests.trust.guard import guarded_environment, sent


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Of all folders, and of files that say what a run does."""
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    return {str(path): stat.S_IMODE(path.stat().st_mode) for path in folders}


@pytest.mark.usefixtures("open_umask")
def test_folders_of_runs_searches_and_imports_are_private(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    run = make_recorded_run(root, steps=3, end=None)
    run.add_setting(run.spec(), run.prediction(), {})
    control.stop(run, save=False)
    ask_ranks(run, LiveRequest(setting=1))
    search = TuneDir.create(root / "tunes", Asked(spec=run.spec()))
    archive = tmp_path / "run.zip"
    export_run(run, archive, environment={})
    brought = import_run(archive, root, name="brought")
    for folder in (run.path, search.path, brought.path):
        assert set(modes(folder).values()) == {0o700}
    files = [
        path for folder in (run.path, brought.path) for path in folder.rglob("*.json*") if path.is_file()
    ]
    assert len(files) > 10
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    open_stream(run)


@pytest.fixture
def guarded(tmp_path: Path) -> dict[str, str]:
    """An environment whose Python processes are looked at."""
    own = {
        "LLMTOP_RUNS_DIR": str(tmp_path / "runs"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    return guarded_environment({**os.environ, **own}, tmp_path)


def test_the_guard_sees_what_is_sent(guarded: dict[str, str]) -> None:
    for code in (
        "import socket; socket.create_connection(('192.0.2.1', 80), 1)",
        "import urllib.request; urllib.request.urlopen('http://nowhere.invalid/')",
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
    ):
        before = len(sent(guarded))
        done = subprocess.run([sys.executable, "-c", code], env=guarded, capture_output=True, check=False)
        assert done.returncode != 0 and len(sent(guarded)) > before


def test_no_command_turns_to_the_network(guarded: dict[str, str], tmp_path: Path) -> None:
    make_recorded_run(tmp_path / "runs", steps=4)
    calls = [
        *(
            ["plan", "cpu-demo"],
            ["plan", "--model", "meta-llama/Llama-3.1-8B"],
            ["presets"],
            ["doctor"],
            ["ls"],
        ),
        *(["report", "latest"], ["report", "latest", "--html", "page.html"], ["export", "latest"]),
        *(["compare", "latest", "latest"], ["logs", "latest"], ["attach", "latest", "--plain"]),
    ]
    code = "import sys; from llmtop.tui.cli import main\n"
    code += f"for words in {calls!r}: main(list(words))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=guarded,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert sent(guarded) == ""
    page = (tmp_path / "page.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org/", "") and "src=" not in page

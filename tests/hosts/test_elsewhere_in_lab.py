"""A run on another machine over real SSH, whose cable is pulled: in network namespaces with an sshd each."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtop.presets.errors import ExitCode
from llmtop.profiler.record.rundir import RunDir, list_runs
from tests.hosts.in_lab import IN_LAB
from tests.hosts.lab import Lab, wait_for
from tests.trainer.supervised import TIMEOUT_SECONDS, worker_command

pytestmark = [pytest.mark.slow, IN_LAB]
GRACES = "peers=0.3,kill=5,stop=5,stop_kill=3,save=60,finish=30,host=90"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path, hosts=2) as made:
        yield made


@pytest.fixture
def far(lab: Lab) -> RunDir:
    """A run of two ranks that host h1 has started by itself."""
    own = {
        "LLMTOP_RUNS_DIR": str(lab.runs_of("h1")),
        "LLMTOP_WORKER_COMMAND": worker_command("trains"),
        "LLMTOP_GRACES": GRACES,
    }
    words = ("run", "cpu-demo", "--gpu", "cpu", "--detach", "--force", "--steps", "1000000")
    command = lab.inside("h1", [sys.executable, "-m", "llmtop.tui.cli", *words])
    done = subprocess.run(
        command, env={**lab.environment, **own}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return list_runs(lab.runs_of("h1"))[0]


class Watching:
    """`attach --plain` on the launching machine, line by line."""

    def __init__(self, lab: Lab, ref: str) -> None:
        command = lab.inside("lead", [sys.executable, "-m", "llmtop.tui.cli", "attach", ref, "--plain"])
        variables = {"XDG_CACHE_HOME": str(lab.root / "cache"), "LLMTOP_REMOTE_PYTHON": sys.executable}
        self.process = subprocess.Popen(
            command,
            env={**lab.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def has(self, words: str, after: int = 0) -> bool:
        return any(words in line for line in self.lines[after:])

    def told(self) -> str:
        return "".join(self.lines[-20:])

    def end(self) -> int:
        code = self.process.wait(TIMEOUT_SECONDS)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def test_a_pulled_cable_is_told_and_what_was_written_meanwhile_comes(lab: Lab, far: RunDir) -> None:
    python = {"LLMTOP_REMOTE_PYTHON": sys.executable}
    watching = Watching(lab, "h1:latest")
    wait_for(lambda: watching.has("running  step "), watching.told)
    lab.pull_cable("h1")
    # While it is noticed by who watches.
    listed = lab.llmtop("ls", "h1:", "h2:", check=False, variables=python)
    assert listed.returncode == ExitCode.USAGE
    wait_for(lambda: watching.has("no connection to h1 for "), watching.told)
    assert "h1 cannot be asked" in listed.stderr and "no run on h2" in listed.stderr
    lab.plug_in("h1")
    wait_for(lambda: watching.has("h1 answers again, after "), watching.told)
    at = next(at for at, line in enumerate(watching.lines) if "h1 answers again, after " in line)
    wait_for(lambda: watching.has("running  step ", at), watching.told)
    listed = lab.llmtop("ls", "h1:", "h2:", variables=python)
    assert far.run_id in listed.stdout and "running" in listed.stdout
    stopped = lab.llmtop("stop", "h1:latest", variables=python)
    assert "it has ended on h1" in stopped.stdout
    assert watching.end() == ExitCode.DONE, watching.told()
    (near,) = lab.root.glob(f"cache/llmtop/remote/*/{far.run_id}")
    logs = sorted(path.name for path in far.path.glob("*.jsonl"))
    assert {"rank-0.jsonl", "rank-1.jsonl", "supervisor.jsonl"} <= set(logs)
    for name in logs:
        assert (near / name).read_bytes() == (far.path / name).read_bytes(), name

"""Hosts that were never reached: what is said at once, and by `stop`, `delete` and the app afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtop.presets.errors import ExitCode
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import RunEnded, RunStarted
from llmtop.profiler.record.hostevents import HostFound, HostJoined, HostLeft, HostLost
from llmtop.profiler.record.hosts import write_hosts
from llmtop.profiler.record.rundir import SUPERVISOR
from llmtop.trainer.hosts.left import hosts_left_open, hosts_never_there
from llmtop.tui.app import LlmtopApp
from llmtop.tui.cli import main
from llmtop.tui.commands.follow import follow
from llmtop.tui.commands.follow_hosts import HostNarrator
from tests.hosts.over_hosts import GRACES, OverHosts, fake_ranks, stand_in
from tests.trainer.supervised import cleaned_up
from tests.tui.tuiruns import wait_for_text


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    stand_in(tmp_path, monkeypatch)
    (tmp_path / "notes").mkdir()
    fake_ranks(monkeypatch, "trains", GRACES + ",connect=1")
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield tmp_path / "runs"


def without(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is on the PATH than the stand-ins that are left."""
    (tmp_path / "bin" / program).unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
async def test_hosts_that_were_never_there_have_nothing_to_end(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: str,
) -> None:
    for name in ("h1", "h2"):
        (tmp_path / "notes" / f"unreachable-{name}").touch()
    with cleaned_up() as started:
        run = OverHosts(root, launcher=launcher)  # type: ignore[arg-type]
        started.append(run)
        if launcher == "pdsh":
            without("pdsh", tmp_path, monkeypatch)
        run.start()
        end = run.end()
    assert end.state == "failed" and "--exclude" not in end.fix
    assert main(["stop", "latest"]) == ExitCode.DONE
    assert "never there, so nothing runs there: h1, h2" in capsys.readouterr().out
    app = LlmtopApp("monitor", run.run, root)
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_for_text(pilot, "hosts 0/2", "✗ not there")
    assert main(["delete", "latest", "--yes"]) == ExitCode.DONE
    assert "part" not in capsys.readouterr().err and not run.run.path.exists()


def test_only_the_host_that_was_there_keeps_its_part(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes" / "unreachable-h2").touch()
    # Long enough for the other host to be reached, however busy the machine is.
    fake_ranks(monkeypatch, "trains", GRACES + ",connect=4")
    with cleaned_up() as started:
        run = OverHosts(root)
        started.append(run)
        run.start()
        end = run.end()
    assert "h2: cannot be reached" in end.reason and "No route to host" in end.reason
    assert "--exclude" in end.fix
    assert main(["stop", "latest"]) == ExitCode.DONE
    assert "never there, so nothing runs there: h2" in capsys.readouterr().out
    assert main(["delete", "latest", "--yes"]) == ExitCode.DONE
    assert "common file system, h1 keeps its part" in capsys.readouterr().err


def test_a_start_that_reached_nobody_says_nothing_of_the_one_before(root: Path) -> None:
    run = OverHosts(root)
    gone = "its launching machine is gone"
    with EventWriter(run.run.events_path(SUPERVISOR), src=SUPERVISOR) as log:
        log.write(HostJoined(host="h1", pid=2, first_rank=0, ranks=1))
        log.write(HostJoined(host="h2", pid=2, first_rank=1, ranks=1))
        log.write(HostLeft(host="h1", reason="done"))
        log.write(HostLeft(host="h2", reason=gone, answered=False))
        log.write(HostLeft(host="h1", reason="was never there", answered=False, was_there=False))
        log.write(HostLeft(host="h2", reason="was never there", answered=False, was_there=False))
        assert hosts_left_open(run.run) == {"h2": gone}
        assert hosts_never_there(run.run) == {}
        log.write(HostLeft(host="h2", reason="done"))
        assert hosts_left_open(run.run) == {}


def test_who_follows_a_run_is_told_of_its_hosts_as_it_comes(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = OverHosts(root)
    write_hosts(run.run, run.hosts)
    started = RunStarted(
        run_id=run.run.run_id, name="x", pid=1, host="here", world_size=2, llmtop_version="0.1.0"
    )
    narrator = HostNarrator(run.run)
    with EventWriter(run.run.events_path(SUPERVISOR), src=SUPERVISOR) as log:
        log.write(HostLost(host="h1", quiet_seconds=10.0, reason="of an earlier start"))
        log.write(started)
        log.write(HostLost(host="h2", quiet_seconds=10.0, reason="No route to host"))
        assert list(narrator.lines()) == ["host h2 does not answer: No route to host"]
        assert list(narrator.lines()) == []
        log.write(HostFound(host="h2", away_seconds=12.0))
        assert list(narrator.lines()) == ["host h2 answers again, after 12.0 s"]
        for _ in range(8):
            log.write(HostLost(host="h2", quiet_seconds=10.0))
        assert list(narrator.lines())[6:] == ["and so with 2 more hosts"]
        log.write(RunEnded(state="failed", reason="2 hosts of 2 cannot be used"))
    assert follow(run.run).status == "failed"
    assert "host h2 does not answer: No route to host\n" in capsys.readouterr().err


@pytest.mark.parametrize("launcher", ["ssh", "srun", "pdsh"])
def test_no_run_is_made_without_what_starts_its_hosts(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: str,
) -> None:
    without(launcher, tmp_path, monkeypatch)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("h1 slots=1\nh2 slots=1\n")
    words = ["run", "cpu-demo", "--hostfile", str(hostfile), "--launcher", launcher, "--headless"]
    assert main([*words, "--remote-python", sys.executable]) == ExitCode.USAGE
    assert f"{launcher} is not on the PATH" in capsys.readouterr().err
    assert not root.exists()

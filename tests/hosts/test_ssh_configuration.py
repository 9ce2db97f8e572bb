"""Hosts are reached as the person's own ssh does it: behind another one, by an agent, over one connection."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.hosts.in_lab import IN_LAB, fake
from tests.hosts.lab import Lab, wait_for

pytestmark = [pytest.mark.slow, IN_LAB]


@pytest.fixture
def agent(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has the only key that hosts take, and nobody else knows a file of it."""
    socket = lab.root / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        wait_for(socket.exists)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        subprocess.run(["ssh-add", "-q", str(lab.root / "user_key")], check=True)
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Of shared connections: their names have bounds that a test's folder may pass."""
    with TemporaryDirectory(prefix="lt-") as folder:
        yield Path(folder)


@pytest.mark.usefixtures("agent")
def test_a_jump_host_an_agent_and_shared_connections_do_what_ssh_does_with_them(
    lab: Lab, sockets: Path
) -> None:
    lines = lab.ssh_config.read_text().splitlines()
    config = "\n".join(line for line in lines if "Identit" not in line)
    config = config.replace(f"HostName {lab.address('h2')}", f"HostName {lab.address('h2')}\n ProxyJump h1")
    lab.ssh_config.write_text(
        f"{config}\n ControlMaster auto\n ControlPath {sockets}/%C\n ControlPersist 2\n"
    )
    # From the launching machine no other way leads to h2.
    block = lab.inside("lead", ["ip", "route", "add", "blackhole", lab.address("h2")])
    subprocess.run(block, check=True)
    run = fake(lab, "changes")
    run.wait_for(lambda: run.lines_of(0) > 3 and run.lines_of(1) > 3)
    wait_for(lambda: len(list(sockets.iterdir())) == 2, run.log)
    run_id = run.run.run_id
    assert "learning_rate" in lab.llmtop("set", run_id, "learning_rate=0.001").stdout
    python = {"LLMTOP_REMOTE_PYTHON": sys.executable}
    assert run_id in lab.llmtop("ls", "h2:", variables=python).stdout
    assert lab.llmtop("stop", run_id).returncode == 0
    assert run.end().state == "stopped"
    for rank, host in ((0, "h1"), (1, "h2")):
        assert (run.run.path / f"rank-{rank}.jsonl").read_bytes() == run.far_bytes(host, f"rank-{rank}.jsonl")

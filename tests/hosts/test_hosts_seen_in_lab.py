"""Who looks at hosts sees a pulled cable: in network namespaces with an sshd each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtop.profiler.fleet.findings import HostFinding, fleet_findings
from llmtop.profiler.fleet.reading import FleetReader
from llmtop.profiler.fleet.summary import decoder
from llmtop.profiler.record.hosts import HostDir, read_hosts
from llmtop.profiler.record.rundir import list_runs
from tests.hosts.in_lab import IN_LAB
from tests.hosts.lab import Lab, wait_for
from tests.trainer.supervised import worker_command

pytestmark = [pytest.mark.slow, IN_LAB]
GRACES = "peers=0.3,kill=5,stop=5,stop_kill=3,save=60,finish=30,host=90"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path, hosts=2) as made:
        yield made


def test_a_host_whose_cable_is_pulled_is_lost_and_found_and_its_link_is_named(lab: Lab) -> None:
    variables = {"LLMTOP_WORKER_COMMAND": worker_command("trains"), "LLMTOP_GRACES": GRACES}
    lab.llmtop(
        *("run", "cpu-demo", "--gpu", "cpu", "--hostfile", str(lab.hostfile()), "--detach", "--force"),
        *("--sample-seconds", "0.5", "--steps", "100000"),
        *(word for name in variables for word in ("--env", name)),
        variables=variables,
    )
    run = list_runs(lab.lead_runs)[0]
    hosts = read_hosts(run)
    assert hosts is not None
    reader = FleetReader(run, hosts)

    def findings() -> dict[str, HostFinding]:
        reader.poll()
        found = fleet_findings(reader.fleet, run.run_id, reader.quiet_seconds(), goes_on=True)
        return {one.key: one for one in found}

    def step(host: str) -> int:
        reader.poll()
        told = reader.fleet.hosts[host].summary
        return told.step if told is not None else 0

    wait_for(lambda: step("h1") >= 2 and step("h2") >= 2)
    assert "host_lost" not in findings()
    lab.pull_cable("h2")
    wait_for(lambda: "host_lost" in findings())
    assert findings()["host_lost"].host == "h2"
    before = step("h2")
    lab.plug_in("h2")
    wait_for(lambda: "host_found" in findings() and "link_lost" in findings() and step("h2") > before)
    assert findings()["link_lost"].host == "h2" and "host_lost" not in findings()
    assert lab.llmtop("stop", run.run_id).returncode == 0
    far = hosts.host("h2")
    assert far is not None
    lines = HostDir(run.path, far).summary_path.read_bytes().splitlines()
    assert ("eth0",) in {decoder().decode(line).links_down for line in lines}

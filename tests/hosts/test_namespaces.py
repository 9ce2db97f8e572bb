"""Hosts for real: network namespaces with an sshd each, no common file system, cables that are pulled."""

from __future__ import annotations

import pytest

from llmtop.profiler.record.checkpointevents import CheckpointLoaded, CheckpointSaved
from llmtop.profiler.record.events import ModelBuilt
from llmtop.profiler.record.hostevents import ClockMeasured, HostFound, HostLeft, HostLost
from llmtop.trainer import control
from tests.hosts.in_lab import GRACES, IN_LAB, fake, launch
from tests.hosts.lab import Lab, wait_for
from tests.trainer.supervised import TIMEOUT_SECONDS

pytestmark = [pytest.mark.slow, IN_LAB]


def test_a_pulled_cable_is_told_and_nothing_is_lost_when_it_is_back(lab: Lab) -> None:
    run = fake(lab, "trains", hostfile=lab.hostfile(2))
    run.wait_for_step(2)
    lab.pull_cable("h2")
    run.wait_for(lambda: bool(run.of(HostLost)))
    assert [one.host for one in run.of(HostLost)] == ["h2"]
    refused = lab.llmtop("set", run.run.run_id, "learning_rate=0.001", check=False)
    assert refused.returncode != 0 and "host h2 does not answer now" in refused.stderr
    before = run.lines_of(2)
    lab.plug_in("h2")
    run.wait_for(lambda: bool(run.of(HostFound)))
    run.wait_for(lambda: run.lines_of(2) > before)
    assert lab.llmtop("stop", run.run.run_id).returncode == 0
    run.end()
    # Every byte that the hosts have written is here, in its order.
    for host, ranks in (("h1", (0, 1)), ("h2", (2, 3))):
        own = [f"hosts/{host}/{name}.jsonl" for name in ("supervisor", "hardware", "summary")]
        for name in [*(f"rank-{rank}.jsonl" for rank in ranks), *own]:
            assert (run.run.path / name).read_bytes() == run.far_bytes(host, name), name
    clocks = {one.host: one for one in run.of(ClockMeasured)}
    assert set(clocks) == {"h1", "h2"}
    assert all(abs(one.offset_seconds) <= one.error_seconds + 0.01 for one in clocks.values())


def test_a_host_that_dies_ends_the_run_and_is_named(lab: Lab) -> None:
    run = fake(lab, "trains", hostfile=lab.hostfile((2, 1)), graces=GRACES.replace("host=40", "host=12"))
    run.wait_for_step(2)
    lab.pull_cable("h2")
    lab.kill_processes("h2")
    end = run.end()
    assert end.state == "failed" and end.reason.startswith("host h2: has not answered for")
    assert "its ranks are 2" in end.reason and "not every host answered" in end.reason
    assert {one.host for one in run.of(HostLeft)} == {"h1", "h2"}
    lab.plug_in("h2")
    lab.start_host("h2")
    # Asked again, it says itself that nothing runs there.
    assert lab.llmtop("stop", run.run.run_id).returncode == 0


def test_a_host_ends_its_ranks_by_itself_when_its_cable_stays_out(lab: Lab) -> None:
    run = fake(lab, "trains", graces=GRACES.replace("host=40", "host=20"))
    run.wait_for_step(2)
    lab.pull_cable("h2")
    run.wait_for(lambda: bool(run.of(HostLost)))
    # It reaches the others, and says which it did not.
    stopped = lab.llmtop("stop", run.run.run_id, check=False)
    assert stopped.returncode != 0 and "not known to have ended: host h2" in stopped.stderr
    # The other host's ranks still train: it has not heard of the end.
    end = control.wait_for_end(run.run, TIMEOUT_SECONDS)
    assert end is not None and end.state == "stopped"
    wait_for(lambda: b"run_ended" in run.far_bytes("h2", "hosts/h2/supervisor.jsonl"))
    assert b"the launching machine was not heard of for 20 s" in run.far_bytes(
        "h2", "hosts/h2/supervisor.jsonl"
    )
    lab.plug_in("h2")
    wait_for(lambda: len(lab.processes("h2")) <= 1, lambda: lab.processes("h2"))


@pytest.mark.timeout(600)
def test_zero3_over_two_hosts_goes_on_as_zero2_and_leaves_a_checkpoint_on_both(lab: Lab) -> None:
    """gloo between the namespaces, states without a common file system, the real worker."""
    run = launch(lab, "--zero", "3", "--micro-batch", "1")
    run.wait_for_step(2)
    relaunched = lab.llmtop("set", run.run.run_id, "zero=2")
    assert "changed from step" in relaunched.stdout
    assert [one.world_size for one in run.events(1) if isinstance(one, CheckpointLoaded)] == [2]
    built = [event for event in run.events(1) if isinstance(event, ModelBuilt)]
    assert ["3" in str(one.engine_optimizer) for one in built] == [True, False]
    lab.llmtop("stop", run.run.run_id, "--save")
    end = run.end()
    assert end.state == "stopped" and "saved in" in end.reason
    saved = [event for event in run.events(0) if isinstance(event, CheckpointSaved)][-1]
    name = f"checkpoints/step-{saved.step}"
    files = sorted(path.name for path in (lab.runs_of("h1") / run.run.run_id / name).iterdir())
    assert files == ["index.json", "llmtop.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    for file in files:
        assert run.far_bytes("h1", f"{name}/{file}") == run.far_bytes("h2", f"{name}/{file}")

"""A real supervisor over fake ranks and fake GPUs: what of the driver gets into the record and the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtop.profiler.findings.find import findings
from llmtop.profiler.record.events import HardwareSampled, RankStarted, TopologySeen, XidSeen
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from tests.recorded_spec import recorded_prediction, recorded_spec
from tests.trainer.fakedriver import stand_in_for_the_driver
from tests.trainer.supervised import Supervised, cleaned_up, fake_ranks

TWO_GPUS = """
gpus = [FakeGpu(uuid=f"GPU-{number}") for number in range(2)]
for number, gpu in enumerate(gpus):
    gpu.links, gpu.bus_id, gpu.energy_mj = [1] * 18, f"00000000:{number:02X}:00.0", 1000
gpus[1].xids = XIDS
"""

Start = Callable[[str, list[int]], Supervised]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def begin(scenario: str, xids: list[int]) -> Supervised:
        stand_in_for_the_driver(monkeypatch, tmp_path / "driver", TWO_GPUS.replace("XIDS", repr(xids)))
        fake_ranks(monkeypatch, scenario)
        supervised = Supervised(tmp_path / "runs")
        spec = recorded_spec("cuda", ranks=2, sample_seconds=0.1)
        supervised.run = RunDir.create(tmp_path / "runs", spec, recorded_prediction(spec), {})
        started.append(supervised)
        supervised.start()
        return supervised

    with cleaned_up() as started:
        yield begin


def test_topology_and_samples_are_in_the_record(start: Start) -> None:
    run = start("finishes", [])
    assert run.end().state == "completed"
    (seen,) = run.of(TopologySeen)
    assert [pair.road for pair in seen.topology.pairs] == ["NV18"]
    kinds = [type(event) for event in run.events()]
    assert kinds.index(RankStarted) < kinds.index(TopologySeen), "the ranks do not wait for it"
    samples = [event for event in run.events("hardware") if isinstance(event, HardwareSampled)]
    assert [device.index for device in samples[0].devices] == [0, 1]
    assert samples[0].devices[0].energy_joules == 1.0
    assert run.of(XidSeen) == []
    assert read_state(run.run).topology == seen.topology


def test_an_xid_is_written_found_and_named_in_the_end(start: Start) -> None:
    run = start("exits_seven", [45, 79])
    end = run.end()
    assert end.state == "failed"
    assert end.reason.endswith("the driver reported Xid 79 of GPU 1: the GPU has fallen off the bus")
    assert end.fix.startswith("take the GPU out of use")
    assert [(event.device, event.xid) for event in run.of(XidSeen)] == [(1, 45), (1, 79)]
    state = read_state(run.run)
    told = [f for f in findings(state, run.run.spec(), run.run.prediction()) if f.key == "xid"]
    assert {finding.severity for finding in told} == {"critical"} and len(told) == 2


def test_a_flood_of_xids_does_not_fill_the_record(start: Start) -> None:
    run = start("trains", [13] * 5000)
    run.wait_for(lambda: len(run.of(XidSeen)) >= 200)
    run.wait_for_step(3)
    assert len(run.of(XidSeen)) == 200

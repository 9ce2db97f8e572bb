"""Findings about the GPUs, the energy of a run, and what a post-mortem makes of the driver's errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.profiler.findings.find import Finding, findings
from llmtop.profiler.fold.energy import EnergyUse
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import HISTORY_SAMPLES, RunState
from llmtop.profiler.hardware.xid import xid_seen
from llmtop.profiler.record.deviceevents import DeviceSample, LinkSample, Topology
from llmtop.profiler.record.events import AnyEvent, HardwareSampled, StepFinished, TopologySeen
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.text import render
from llmtop.profiler.units import format_joules
from tests.recorded import make_recorded_run, recorded_topology
from tests.recorded_spec import recorded_prediction, recorded_spec


def found(*events: AnyEvent) -> dict[str, Finding]:
    spec = recorded_spec("cuda")
    state = fold(RunState(run_id="a-run"), events)
    return {finding.key: finding for finding in findings(state, spec, recorded_prediction(spec))}


def sample(**fields: Any) -> HardwareSampled:
    return HardwareSampled(devices=(DeviceSample(index=0, **fields),))


def step(number: int, tokens: int = 1000) -> StepFinished:
    return StepFinished(step=number, src="rank0", loss=2.0, step_seconds=1.0, tokens=tokens)


def test_an_xid_is_critical_and_says_what_to_do() -> None:
    told = found(xid_seen(1, 79), xid_seen(1, 79))["xid"]
    assert told.severity == "critical" and told.title == "Xid 79 on GPU 1"
    assert "fallen off the bus" in told.evidence and "2 Xid errors" in told.evidence
    assert "restart the machine" in told.change


def test_a_device_that_was_lost_stays_so() -> None:
    told = found(sample(is_lost=True), sample(power_watts=100.0))["gpu_lost"]
    assert told.severity == "critical" and told.title == "GPU 0 is lost"


def test_memory_errors_of_this_run_are_worse_than_old_ones() -> None:
    old = found(sample(ecc_uncorrected=2), sample(ecc_uncorrected=2))["ecc_uncorrected"]
    assert old.severity == "warning" and "2 errors" in old.evidence
    new = found(sample(ecc_uncorrected=2), sample(), sample(ecc_uncorrected=3))["ecc_uncorrected"]
    assert new.severity == "critical" and "1 of them" in new.evidence
    later = [sample(ecc_uncorrected=3)] * (HISTORY_SAMPLES + 1)
    assert found(sample(ecc_uncorrected=2), *later)["ecc_uncorrected"].severity == "critical"
    assert "ecc_uncorrected" not in found(sample(ecc_uncorrected=0), sample())


def test_memory_that_waits_for_a_reset_or_cannot_be_replaced() -> None:
    assert found(sample(remap_pending=True))["remap_pending"].severity == "warning"
    assert found(sample(retirement_pending=True))["remap_pending"].severity == "warning"
    assert found(sample(remap_failed=True))["remap_failed"].severity == "critical"
    assert not found(sample(remap_failed=False, remap_pending=False))


def test_heat_is_judged_by_the_devices_own_limit() -> None:
    device = replace(recorded_topology(1).devices[0], slowdown_celsius=90.0)
    topology = TopologySeen(topology=Topology(devices=(device,)))
    hot = [sample(temperature_celsius=88.0)] * 5
    assert "88 C" in found(topology, *hot)["gpu_hot"].evidence
    assert "gpu_hot" not in found(topology, *[sample(temperature_celsius=80.0)] * 5)
    assert "gpu_hot" not in found(*hot), "nobody says when it slows down"


def test_link_errors_are_those_of_the_run() -> None:
    def links(crc: int) -> HardwareSampled:
        return sample(links=(LinkSample(0, 1, 1, 7, 0, 0), LinkSample(4, 1, 1, crc, 0, 0)))

    assert "nvlink_errors" not in found(links(100), sample(), links(100))
    told = found(links(100), sample(), links(103))["nvlink_errors"]
    assert told.evidence.endswith("GPU 0 link 4: 3")
    down = sample(links=(LinkSample(0, 1, 1, 7, 0, 0),))
    assert found(links(100), links(103), down, sample())["nvlink_errors"].evidence.endswith("GPU 0 link 4: 3")


def test_a_slow_road_is_worth_a_word() -> None:
    topology = recorded_topology(2)
    pair = replace(topology.pairs[0], road="SYS", nvlinks=None)
    told = found(TopologySeen(topology=replace(topology, pairs=(pair,))))["no_nvlink"]
    assert told.severity == "info" and "GPU 0 and 1" in told.evidence
    assert not found(TopologySeen(topology=topology))


def test_titles_fit_half_a_terminal() -> None:
    told = found(
        xid_seen(7, 140),
        sample(ecc_uncorrected=1, remap_failed=True),
        sample(is_lost=True),
        sample(remap_pending=True),
    )
    assert told and all(len(finding.title) <= 36 and finding.change for finding in told.values())


# --- energy -----------------------------------------------------------------------------------------


def energy(*events: AnyEvent) -> EnergyUse:
    return fold(RunState(), events).energy


def joules(*totals: float | None) -> HardwareSampled:
    return HardwareSampled(
        devices=tuple(DeviceSample(index=i, energy_joules=total) for i, total in enumerate(totals))
    )


def test_energy_begins_with_the_run() -> None:
    use = energy(joules(5000.0, 100.0), joules(5600.0, 150.0))
    assert use.joules == {0: 600.0, 1: 50.0} and use.total_joules == 650.0
    assert energy(joules(None)).total_joules is None
    assert use.joules_per_token is None


def test_energy_per_token_leaves_out_the_start() -> None:
    use = energy(
        joules(0.0), joules(9000.0), step(1), joules(10_000.0), step(2), step(3), step(4), joules(13_000.0)
    )
    assert use.joules_per_token == pytest.approx(1.0)


def test_a_repeated_total_is_no_new_reading() -> None:
    before = energy(joules(0.0), step(1), joules(500.0), step(2), joules(1000.0))
    after = energy(joules(0.0), step(1), joules(500.0), step(2), joules(1000.0), step(3), joules(1000.0))
    assert after.joules_per_token == before.joules_per_token == pytest.approx(0.5)


def test_a_total_that_begins_anew_takes_nothing_back() -> None:
    assert energy(joules(1000.0), joules(1500.0), joules(10.0), joules(60.0)).total_joules == 550.0


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=30), st.integers(0, 30))
def test_energy_does_not_depend_on_the_cuts(totals: list[float], cut: int) -> None:
    events: list[AnyEvent] = [event for total in totals for event in (joules(total), step(1, 10))]
    whole = fold(RunState(), events)
    assert fold(fold(RunState(), events[:cut]), events[cut:]).energy == whole.energy
    assert whole.energy.total_joules is not None and whole.energy.total_joules >= 0


def test_a_report_tells_what_was_drawn(tmp_path: Path) -> None:
    report = build_report(make_recorded_run(tmp_path, kind="cuda"))
    assert all(device.energy_joules for device in report.devices)
    assert report.joules_per_token is not None and report.joules_per_token > 0
    assert re.search(r"energy +[\d.]+ kJ of all GPUs, [\d.]+ J a token", render(report))
    assert build_report(make_recorded_run(tmp_path)).joules_per_token is None
    assert (format_joules(None), format_joules(0.371), format_joules(2.52e7)) == ("n/a", "0.37 J", "25.2 MJ")

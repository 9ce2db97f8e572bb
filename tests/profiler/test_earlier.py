"""What stood out for a while and had faded by the end is in the report, with its steps."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from llmtop.profiler.findings.finding import Finding
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.changeevents import ChangeApplied, ChangeAsked
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import RunEnded, RunStarted, StepFinished
from llmtop.profiler.record.feed import RunStream
from llmtop.profiler.record.recording import logs_size_bytes
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.earlier import FADING
from tests.recorded_spec import recorded_prediction, recorded_spec

RANKS = 3


def recorded(
    root: Path, steps: int, slow: range, settings: tuple[int, ...] = (), ends: bool = True
) -> RunDir:
    """Rank 1 is slow in some steps; `settings` are the first steps of the later ones."""
    spec = recorded_spec("cpu", ranks=RANKS)
    run = RunDir.create(root, spec, recorded_prediction(spec), {})
    with ExitStack() as opened:

        def writer(name: Any, source: str) -> EventWriter:
            return opened.enter_context(EventWriter(run.events_path(name), source))

        supervisor, ranks = writer(SUPERVISOR, SUPERVISOR), [writer(n, f"rank{n}") for n in range(RANKS)]
        started = RunStarted(
            t=0.0, run_id=run.run_id, name="n", pid=1, host="h", world_size=RANKS, llmtop_version="0"
        )
        supervisor.write(started)
        for step in range(1, steps + 1):
            if step in settings:
                number = run.add_setting(spec, recorded_prediction(spec), {})
                supervisor.write(ChangeAsked(t=step - 0.5, setting=number, changes=()))
            for number, rank in enumerate(ranks):
                if step in settings:
                    rank.write(ChangeApplied(t=step - 0.4, setting=settings.index(step) + 1, step=step))
                forward = 0.5 if number == 1 and step in slow else 0.3
                phases: dict[str, float | None] = {
                    "data": 0.01,
                    "forward": forward,
                    "backward": 0.6,
                    "optimizer": 0.09,
                }
                rank.write(
                    StepFinished(t=float(step), step=step, loss=2.0, step_seconds=1.0, phase_seconds=phases)
                )
        if ends:
            supervisor.write(RunEnded(t=steps + 1.0, state="completed", reason="done"))
    return run


def told(run: RunDir) -> dict[str, Finding]:
    return {one.key: one for one in build_report(run).findings}


def test_what_stood_out_for_a_good_part_of_one_setting_is_told_with_its_steps(tmp_path: Path) -> None:
    found = told(recorded(tmp_path, 160, range(41, 111)))["straggler"]
    assert found.title == "all ranks wait for rank 1"
    assert found.evidence.startswith("in steps 41 to 110: ")
    assert "510 ms, the others 310 ms" in found.evidence


@pytest.mark.parametrize("slow", [range(41, 61), range(0)])
def test_what_stood_out_for_a_few_steps_is_not(slow: range, tmp_path: Path) -> None:
    assert "straggler" not in told(recorded(tmp_path, 160, slow))


def test_what_stands_out_at_the_end_is_told_once_as_it_is_then(tmp_path: Path) -> None:
    told = build_report(recorded(tmp_path, 160, range(41, 161))).findings
    (found,) = (one for one in told if one.key == "straggler")
    assert not found.evidence.startswith("in steps")


def test_at_the_end_of_a_setting_it_is_told_of_all_of_that(tmp_path: Path) -> None:
    found = told(recorded(tmp_path, 160, range(91, 141), settings=(121,)))["straggler"]
    assert found.evidence.startswith("in steps 1 to 120: ")


def test_what_stood_out_in_steps_that_are_lost_is_not_told(tmp_path: Path) -> None:
    """It went on from before them, on the setting that came after them."""
    run = recorded(tmp_path, 160, range(31, 151), settings=(151,), ends=False)
    again = RunStarted(
        t=500.0,
        run_id=run.run_id,
        name="n",
        pid=1,
        host="h",
        world_size=RANKS,
        llmtop_version="0",
        goes_on_after=20,
    )
    with EventWriter(run.events_path(SUPERVISOR), SUPERVISOR) as supervisor:
        supervisor.write(RunEnded(t=170.0, state="stopped", reason="asked"))
        supervisor.write(again)
        supervisor.write(RunEnded(t=600.0, state="stopped", reason="asked"))
    with EventWriter(run.events_path(0), "rank0") as rank:
        for step in range(21, 41):
            rank.write(StepFinished(t=500.0 + step, step=step, loss=2.0, step_seconds=1.0))
    assert "straggler" not in told(run)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[RunDir]:
    """Runs whose record was read again."""
    found: list[RunDir] = []

    class Counted(RunStream):
        def __init__(self, run: RunDir) -> None:
            found.append(run)
            super().__init__(run)

    monkeypatch.setattr("llmtop.profiler.report.earlier.RunStream", Counted)
    return found


def test_the_next_report_of_a_long_record_does_not_read_it_again(
    opened: list[RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded(tmp_path, 160, range(41, 111))
    first = told(run)
    assert told(run) == first and len(opened) == 2, "a short one is"
    monkeypatch.setattr("llmtop.profiler.report.keptlooks.WORTH_KEEPING_BYTES", 1)
    assert [told(run) for _ in range(3)] == [first] * 3 and len(opened) == 3
    assert "straggler" in first
    kept = run.looks_path.read_bytes()
    for damaged in (b"{}", kept[:-9], kept.replace(b'"code":"', b'"code":"0')):
        run.looks_path.write_bytes(damaged)
        assert told(run) == first and run.looks_path.read_bytes() == kept
    assert len(opened) == 6
    with run.events_path(0).open("ab") as log:
        log.write(b"\n")
    assert told(run) == first and len(opened) == 7 and run.looks_path.read_bytes() != kept


def test_of_a_run_that_goes_on_nothing_is_kept_of_what_a_report_has_read_again(
    opened: list[RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmtop.profiler.report.keptlooks.WORTH_KEEPING_BYTES", 1)
    run = recorded(tmp_path, 160, range(41, 111), ends=False)
    run.write_supervisor_pid()
    assert told(run) == told(run) and len(opened) == 2 and not run.looks_path.exists()


def test_the_record_is_read_once_more_for_all_settings(opened: list[RunDir], tmp_path: Path) -> None:
    run = recorded(tmp_path, 160, range(1, 91), settings=(51, 101))
    assert told(run)["straggler"].evidence.startswith("in steps 1 to 50: ")
    assert len(opened) == 1


def test_what_more_knowledge_has_mended_did_not_fade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peak that came late is no sign that memory was unused before."""

    def found(state: RunState, *_: object) -> tuple[Finding, ...]:
        keys = ("gpu_hot", "memory_unused") if state.steps_finished <= 60 else ()
        return tuple(Finding(key=key, severity="info", title="", evidence="so", change="") for key in keys)

    monkeypatch.setattr("llmtop.profiler.report.earlier.findings", found)
    (one,) = build_report(recorded(tmp_path, 160, range(0))).findings
    assert (one.key, one.evidence) == ("gpu_hot", "in steps 1 to 60: so")


def test_what_may_fade_is_what_rules_find() -> None:
    rules = "".join(path.read_text() for path in Path(inspect.getfile(Finding)).parent.glob("*.py"))
    assert [key for key in FADING if f'"{key}"' not in rules] == []


@pytest.mark.parametrize("settings", [(), (121,)])
def test_a_long_record_is_not_read_again_for_that_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[int, ...]
) -> None:
    """Whether it had one setting or several."""
    monkeypatch.setattr("llmtop.profiler.report.earlier.MOST_BYTES", 1000)
    monkeypatch.setattr("llmtop.profiler.report.earlier.RunStream", None)
    run = recorded(tmp_path, 160, range(41, 111), settings=settings)
    found = told(run)
    assert "straggler" not in found
    assert found["record_too_long"].change == (
        f"llmtop replay {run.run_id} shows it: n goes from one finding to the next"
    )


def test_of_a_long_record_the_first_settings_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two of a third each the one that ends before the limit."""
    run = recorded(tmp_path, 150, range(1, 101), settings=(51, 101))
    size_bytes = logs_size_bytes(run.event_logs())
    monkeypatch.setattr("llmtop.profiler.report.earlier.MOST_BYTES", size_bytes // 2)
    asked: list[float] = []

    class Watched(RunStream):
        def batches(self, until: float | None = None, *, strictly: bool = False) -> Any:
            asked.append(until or 0.0)
            return super().batches(until, strictly=strictly)

    monkeypatch.setattr("llmtop.profiler.report.earlier.RunStream", Watched)
    found = told(run)
    assert found["straggler"].evidence.startswith("in steps 1 to 50: ")
    assert "record_too_long" in found and len(asked) == 1

"""When the supervisor warns of host memory, when it has the ranks save, and when it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llmtop.profiler.findings.find import findings
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.deviceevents import HostSample
from llmtop.profiler.record.events import AnyEvent, HardwareSampled, RunEnded, StepFinished
from llmtop.profiler.record.failureevents import HostMemoryRunsOut
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.livefile import SaveFile
from llmtop.trainer.supervisor import hostmemory
from llmtop.trainer.supervisor.hostmemory import SAVE_SECONDS, WARN_SECONDS, HostMemoryWatch
from llmtop.trainer.supervisor.progress import Progress
from llmtop.tui.commands.follow import Narrator
from tests.recorded_spec import GIB, recorded_prediction, recorded_spec

LIMIT = 16 * GIB
BEGAN = 1000.0


def sample(second: float, used: float) -> HardwareSampled:
    return HardwareSampled(
        t=BEGAN + second, host=HostSample(cgroup_limit_bytes=LIMIT, cgroup_used_bytes=int(used))
    )


class Watched:
    def __init__(self, root: Path, steps: int = 1_000_000) -> None:
        spec = recorded_spec("cpu", steps=steps)
        self.run = RunDir.create(root, spec, recorded_prediction(spec), {})
        self.events: list[AnyEvent] = []
        self.watch = HostMemoryWatch(self.run, self.events.append, lambda line: None)
        self.progress = Progress(self.run, spec.world_size)
        for number in range(1, 12):
            self.progress._note(0, StepFinished(step=number, step_seconds=1.0, t=BEGAN))

    def fill(self, seconds_left: float, at: float = 100.0) -> list[str]:
        """Samples of a minute, after which memory is full in so many seconds; what was told."""
        rate = LIMIT / (at + seconds_left)
        for second in range(61):
            now = at - 60 + second
            self.watch.see(sample(now, rate * now), self.progress, self.run.spec())
        return [event.action for event in self.events if isinstance(event, HostMemoryRunsOut)]

    @property
    def asked(self) -> int:
        request = SaveFile(self.run).newest()
        return request.number if request is not None else 0


@pytest.mark.parametrize(
    ("seconds_left", "told", "asked"),
    [
        (2 * WARN_SECONDS, [], 0),
        (WARN_SECONDS / 2, ["warned"], 0),
        (SAVE_SECONDS / 2, ["save_asked"], 1),
    ],
)
def test_a_warning_comes_first_and_a_checkpoint_before_the_end(
    tmp_path: Path, seconds_left: float, told: list[str], asked: int
) -> None:
    watched = Watched(tmp_path)
    # Thirty samples are the fewest that tell anything, and by then memory is nearer to full by that much.
    assert watched.fill(seconds_left)[-1:] == told and watched.asked == asked
    assert watched.fill(seconds_left, at=200.0)[-1:] == told, "asked once"


def test_a_run_that_ends_before_is_left_alone(tmp_path: Path) -> None:
    assert Watched(tmp_path, steps=30).fill(SAVE_SECONDS / 2) == []


def test_memory_that_does_not_grow_is_no_reason(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    for second in range(100):
        full = LIMIT * (0.98 if second % 2 else 0.97)
        watched.watch.see(sample(second, full), watched.progress, watched.run.spec())
    assert watched.events == []


def test_a_slow_checkpoint_is_asked_for_earlier(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.progress._seconds.extend([200.0] * 50)
    assert watched.fill(WARN_SECONDS) == ["save_asked"]


def test_no_room_for_a_checkpoint_is_told_and_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostmemory, "free_bytes", lambda path: 1000)
    watched = Watched(tmp_path)
    assert watched.fill(SAVE_SECONDS / 2)[-1] == "no_room" and watched.asked == 0
    event = watched.events[-1]
    assert isinstance(event, HostMemoryRunsOut) and event.reason.endswith("are free there")


def test_what_was_done_is_in_the_findings_while_it_runs_and_after(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.fill(SAVE_SECONDS / 2)
    spec = watched.run.spec()
    told = replace(watched.events[-1], t=BEGAN + 100)

    def evidence(*events: Any) -> dict[str, str]:
        state = fold(RunState(), [told, *events])
        found = findings(state, spec, recorded_prediction(spec))
        return {one.key: one.evidence for one in found}

    lines = list(Narrator(spec).lines(fold(RunState(), [told]), 0.0))
    assert any(line.startswith("host memory full in") and "a checkpoint is made" in line for line in lines)
    killed = RunEnded(state="out_of_memory", reason="rank 0 was killed", t=BEGAN + 200)
    assert "a checkpoint was asked for when" in evidence(killed)["host_memory_grew"]
    assert "host_memory_grew" not in evidence(RunEnded(state="completed", reason="", t=BEGAN + 200))

"""What a lead has in place of samples of its own hardware: the ranks are on machines that tell theirs."""

from __future__ import annotations

from collections.abc import Iterable

from llmtop.profiler.record.deviceevents import HostSample
from llmtop.trainer.supervisor.hardwarewatch import HardwareWatch
from llmtop.trainer.supervisor.oom import Evidence, OomWatch


class NoHardware(HardwareWatch):
    def __init__(self) -> None:
        self._sampler = None
        self._newest = None
        self._xids = []
        self.every_seconds = 1.0
        self.rank_memory_bytes = {}

    def sample(self, rank_pids: dict[int, int]) -> None:
        return

    def finish(self) -> None:
        return


class NoOom(OomWatch):
    """This machine's kernel log says nothing of another's processes."""

    def __init__(self) -> None:
        return

    def evidence(self, host: HostSample | None, pids: Iterable[int] = ()) -> Evidence | None:
        return None

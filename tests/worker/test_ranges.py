"""DeepSpeed's ranges cost each module of a ZeRO-3 model some microseconds, and are for those who listen."""

from __future__ import annotations

import pytest
from deepspeed.utils import nvtx

from llmtop.trainer.worker.ranges import enter_ranges_if_heard


class Accelerator:
    def __init__(self) -> None:
        self.entered: list[str] = []

    def range_push(self, message: str) -> None:
        self.entered.append(message)

    def range_pop(self) -> None:
        """Nothing to count."""


@pytest.mark.parametrize(
    ("environment", "heard"), [({}, False), ({"NVTX_INJECTION64_PATH": "/opt/nsys/lib"}, True)]
)
def test_ranges_are_entered_where_a_profiler_listens(
    environment: dict[str, str], heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator()
    monkeypatch.setattr(nvtx, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(nvtx, "enable_nvtx", True)

    @nvtx.instrument_w_nvtx  # type: ignore[untyped-decorator]
    def gather() -> int:
        return 7

    enter_ranges_if_heard(environment)
    assert gather() == 7
    assert len(accelerator.entered) == heard

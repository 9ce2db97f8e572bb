"""The upper bound of the peak: narrow where runs were measured, wide elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from llmtop.presets.resolve import Layer, Machine, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.memory.bound import CONSTANT_BYTES, MARGIN, is_measured
from llmtop.profiler.memory.predict import predict, simulated
from tests.h200 import MACHINE, MATRIX, ROWS, measured_peak_bytes, spec_of


def spec(**values: Any) -> RunSpec:
    layer = Layer(source=ValueSource.COMMAND_LINE, detail="test", values={"zero": 3, "gpus": 2, **values})
    return resolve([layer], name="bound", machine=Machine(gpu="h200", gpus=2, host_memory_bytes=None))


@pytest.mark.parametrize(
    ("values", "measured"),
    [
        ({"model": "llama-3.2-1b", "zero": 2}, True),
        ({"model": "llama-3.2-1b", "attention": "flash_attention_3"}, False),
        ({"model": "llama-3.2-1b", "offload_optimizer": "nvme", "nvme_path": "/tmp"}, False),
        ({"model": "mixtral-8x7b"}, False),
    ],
)
def test_what_was_never_measured_has_the_wide_bound(values: dict[str, Any], measured: bool) -> None:
    asked = spec(**values)
    assert is_measured(asked) is measured
    found = predict(asked)
    narrow = found.peak_allocated_bytes * MARGIN + CONSTANT_BYTES
    assert (found.peak_allocated_upper_bytes <= narrow + 1) is measured


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["cell"]))
def test_no_recorded_run_allocated_more(row: dict[str, Any]) -> None:
    largest = max(max(step["fwd_peak"], step["bwd_peak"], step["step_peak"]) for step in row["phases"])
    assert largest <= predict(spec_of(row)).peak_allocated_upper_bytes


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["cell"]))
def test_no_recorded_run_allocates_more_in_its_simulation(row: dict[str, Any]) -> None:
    asked = spec_of(row)
    found = predict(asked)
    run = simulated(asked, found)
    assert run is not None
    assert run.peak_allocated_bytes <= found.peak_allocated_upper_bytes
    assert run.peak_allocated_bytes == pytest.approx(measured_peak_bytes(row), rel=0.005)


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: str(row["cell"]))
def test_nor_does_one_of_the_matrix(row: dict[str, Any]) -> None:
    layer = Layer(source=ValueSource.COMMAND_LINE, detail="cell", values={**row["cell"], "gpu": "h200"})
    asked = resolve([layer], name="matrix", machine=MACHINE)
    found = predict(asked)
    run = simulated(asked, found)
    assert run is not None
    assert run.peak_allocated_bytes <= found.peak_allocated_upper_bytes

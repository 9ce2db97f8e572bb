"""The document about the techniques is made of rows, and of nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import series
from benchmarks.cells import plan
from benchmarks.rows import read_rows
from benchmarks.techniques_doc import slope, write_document
from llmtop.presets.errors import LlmtopError
from llmtop.presets.resolve import Machine

GIB = 2**30
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def fake_row(cell: dict[str, Any]) -> dict[str, Any]:
    """Eager attention takes the square of the length and soon more than there is; the rest is linear."""
    length = cell["seq_len"] / 1024
    eager = cell.get("attention") == "eager"
    work = 4.0 * length**2 if eager else 1.5 * length
    fits = work < 120
    return {
        "cell": cell,
        "status": "completed" if fits else "out_of_memory",
        "reason": "the rank finished" if fits else "CUDA out of memory",
        "device": "NVIDIA H200",
        "versions": {"torch": "2.11"},
        "tokens_per_second": (500.0 if "offload_param" in cell else 5000.0 + 1000 * bool(cell.get("liger"))),
        "peak_allocated_bytes": int((10 + work) * GIB) if fits else None,
        "steady_bytes": 10 * GIB,
    }


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_document_puts_claims_beside_measurements(tmp_path: Path, gpus: int) -> None:
    written = write_document([fake_row(cell) for cell in series.cells(gpus)], tmp_path)
    text = (tmp_path / "techniques.md").read_text()
    assert "quadratic: 16.0 GiB at 2,048 tokens, 64.0 GiB at 4,096" in text
    assert "out of memory at 8,192" in text
    assert "linear: 24.0 GiB at 16,384 tokens, 48.0 GiB at 32,768" in text
    assert "10.0 times" not in text and "12.0 times" in text
    assert "+20 % tokens/s" in text
    assert all(f"| {name} |" in text for name in series.LADDER)
    assert "| n/a" not in text and "|  |" not in text
    for path in written[1:]:
        assert f"({path.name})" in text and path.read_text().startswith("<svg")


def test_the_same_rows_make_the_same_files(tmp_path: Path) -> None:
    rows = [fake_row(cell) for cell in series.cells(1)]
    first = {path.name: path.read_text() for path in write_document(rows, tmp_path / "a")}
    second = {path.name: path.read_text() for path in write_document(rows[::-1], tmp_path / "b")}
    assert first == second


def test_a_place_of_the_ladder_may_wait_for_its_measurement(tmp_path: Path) -> None:
    rows = [fake_row(cell) for cell in series.cells(1)]
    assert rows.pop()["cell"]["series"] == "ladder"
    text = write_document(rows, tmp_path)[0].read_text()
    assert text.count("not measured") == 1


@pytest.mark.parametrize("wanted", ["attention", "liger", "offload", "large"])
def test_nothing_is_written_while_a_result_of_a_claim_is_missing(tmp_path: Path, wanted: str) -> None:
    rows = [fake_row(cell) for cell in series.cells(1)]
    rows.remove(next(row for row in rows if row["cell"]["series"] == wanted))
    with pytest.raises(LlmtopError, match="no result for"):
        write_document(rows, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("gpus", [1, 2])
def test_every_cell_is_an_allowed_run(gpus: int) -> None:
    machine = Machine(gpu="h200", gpus=gpus, host_memory_bytes=None)
    cells = list(series.cells(gpus))
    for cell in cells:
        plan({k: v for k, v in cell.items() if k not in ("series", "name")}, machine, name="test")
    assert len({(c["series"], c["name"], c["seq_len"]) for c in cells}) == len(cells)


def test_growth_is_a_power() -> None:
    assert slope([(2.0, 3.0), (8.0, 48.0)]) == pytest.approx(2.0)


MEASURED = [row for row in read_rows(RESULTS / "techniques.jsonl") if row["status"] == "completed"]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['cell']['name']} {row['cell']['seq_len']}")
def test_every_measured_peak_is_predicted_within_half_a_percent(row: dict[str, Any]) -> None:
    """Those of optimizer and weights on the host too, with all blocks recomputed; none is above its bound."""
    options = {key: value for key, value in row["cell"].items() if key not in ("series", "name")}
    host = Machine(gpu="h200", gpus=1, host_memory_bytes=None)
    told = plan({"gpu": "h200", **options}, host, name="test").prediction
    measured = row["peak_allocated_bytes"]
    assert told.peak_allocated_bytes == pytest.approx(measured, rel=0.005)
    assert told.peak_allocated_upper_bytes >= measured

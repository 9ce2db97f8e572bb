"""What is said of four and eight GPUs: rows of them are scored like any other, and their lack is told."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from benchmarks import restage, throughput, zero3_links
from benchmarks.accuracy.many import judged_on_many, of_many, words_on_many
from benchmarks.accuracy.rows import DESIGN_ROWS, Coverage, Sourced
from benchmarks.accuracy.score import Score, scores
from benchmarks.accuracy.split import Half, half_of
from benchmarks.cells import plan
from benchmarks.rows import Row, key_of, read_rows
from benchmarks.summary import repredicted, summary
from llmtop.presets.resolve import Machine

COVERAGE = Coverage(
    cells=361, measured=171, held_out_cells=169, held_out_measured=36, not_completed=(), many_cells=39,
    many_measured=0, set_aside=(),
)  # fmt: skip


def _as_if_on(gpus: int) -> Row:
    """A row that two GPUs left, with as many ranks and devices as `gpus` would have."""
    row = next(
        row
        for row in read_rows(DESIGN_ROWS)
        if row["status"] == "completed" and row["cell"]["gpus"] == 2 and row["cell"]["zero"] == 3
    )
    first = row["measured"]["ranks"][0]
    ranks = [{**first, "rank": rank} for rank in range(gpus)]
    return {
        **row,
        "cell": {**row["cell"], "gpus": gpus},
        "gpus": gpus,
        "measured": {**row["measured"], "ranks": ranks},
    }


def _scores(gpus: int) -> list[Score]:
    (row,) = repredicted([_as_if_on(gpus)])
    assert half_of(row["cell"]) == Half.HELD_OUT
    return scores([Sourced(row=row, half=Half.HELD_OUT, earlier=False)])


@pytest.mark.parametrize("gpus", [4, 8])
def test_a_row_of_many_gpus_is_predicted_scored_and_judged_by_their_number(gpus: int) -> None:
    found = _scores(gpus)
    assert of_many(found) == found
    # Twice as many ranks share the states: what is predicted of more of them is less than two GPUs held.
    assert found[0].predicted_peak_bytes < found[0].measured_peak_bytes
    lines = list(judged_on_many(found))
    assert {count for count, _ in lines} == {str(gpus)}
    assert [line.count for count, line in lines if line.what == "peak allocated"] == [1]
    assert f"  {gpus} " in summary([_as_if_on(gpus)])


def test_rows_of_fewer_gpus_are_no_part_of_it() -> None:
    found = _scores(4)
    fewer = replace(found[0], row={**found[0].row, "cell": {**found[0].cell, "gpus": 2}})
    assert of_many([fewer]) == [] and list(judged_on_many([fewer])) == []


def test_what_is_not_measured_is_said() -> None:
    assert "**None of the 39 cells on four and eight GPUs are measured.**" in words_on_many(COVERAGE)
    assert "**7 of the 39 cells" in words_on_many(replace(COVERAGE, many_measured=7))


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_what_the_other_scripts_run_there_fits(gpus: int) -> None:
    machine = Machine(gpu="h200", gpus=gpus, host_memory_bytes=512 << 30)
    compared = [{"gpus": gpus, **cell} for cell in throughput.COMPARED[gpus]]
    changed = {**restage._GPU, "gpus": gpus}
    for cell in (*zero3_links.cells(gpus, on_cpu=False), *compared, changed):
        planned = plan(cell, machine, name="test")
        assert planned.prediction.fits and planned.spec.world_size == gpus
    if gpus > 2:
        assert compared[0]["model"] == "llama-3.1-8b"
        hpz = [key_of(cell) for cell in zero3_links.cells(gpus, on_cpu=False) if "hpz" in key_of(cell)]
        assert len(hpz) == 1 and f'"zero_hpz_partition_size": {gpus // 2}' in hpz[0]

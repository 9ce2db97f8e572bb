"""The accuracy as it is told: every goal judged, nothing hidden, and no drift from one change to the next."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.accuracy.__main__ import gathered
from benchmarks.accuracy.differences import AT_LOSS, EXPANDABLE_SEGMENTS, THROUGHOUT, litgpt_block
from benchmarks.accuracy.doc import Evidence, document
from benchmarks.accuracy.goals import LIMIT_PERCENTS, judged, spread, verdicts
from benchmarks.accuracy.lengths import MANY_LENGTHS
from benchmarks.accuracy.published import DATA, _planned, differences
from benchmarks.accuracy.rows import DESIGN_ROWS, EARLIER_ROWS, Sourced, first_rows
from benchmarks.accuracy.score import Score, score, scores, words
from benchmarks.accuracy.split import Half, half_of
from benchmarks.cells import plan
from benchmarks.rows import Row, read_rows
from benchmarks.summary import repredicted
from benchmarks.svgplot import Plot, svg
from llmtop.presets.resolve import Machine
from llmtop.profiler.memory.sizes import sizes_of
from tests.h200 import ROWS, measured_peak_bytes, spec_of

PINNED = 42
"""The first rows of the design's file, to which others are only added."""


@pytest.fixture(scope="module")
def found() -> tuple[Evidence, dict[str, Plot]]:
    return gathered()


@pytest.fixture(scope="module")
def evidence(found: tuple[Evidence, dict[str, Plot]]) -> Evidence:
    return found[0]


@pytest.fixture(scope="module")
def text(evidence: Evidence) -> str:
    return document(evidence)


def _scored(rows: list[Row], *, earlier: bool) -> list[Score]:
    return scores([Sourced(row=row, half=half_of(row["cell"]), earlier=earlier) for row in repredicted(rows)])


@pytest.mark.parametrize(
    ("rows", "mean", "worst"),
    [
        (read_rows(DESIGN_ROWS)[:PINNED], 0.2, 1.5),
        (read_rows(EARLIER_ROWS)[:35], 0.3, 5.5),
        (first_rows(), 0.4, 3.0),
    ],
    ids=["design", "earlier", "first"],
)
def test_the_error_of_the_pinned_rows_does_not_grow(rows: list[Row], mean: float, worst: float) -> None:
    found = _scored(rows, earlier=False)
    assert len(found) == len(rows)
    errors = {each.name: abs(each.peak_percent) for each in found}
    furthest = max(errors, key=lambda name: errors[name])
    assert statistics.fmean(errors.values()) <= mean, f"furthest off: {furthest}"
    assert errors[furthest] <= worst, f"furthest off: {furthest}"
    assert all(each.bound_holds for each in found)


def test_the_first_rows_are_the_same_runs_in_the_form_of_the_others() -> None:
    for recorded, row in zip(ROWS, first_rows(), strict=True):
        machine = Machine(gpu="h200", gpus=1, host_memory_bytes=None)
        ours, theirs = plan({"gpu": "h200", **row["cell"]}, machine, name="r").spec, spec_of(recorded)
        same = (
            "model",
            "gpus",
            "zero",
            "micro_batch",
            "seq_len",
            "attention",
            "optimizer",
            "liger",
            "lora_rank",
        )
        assert [getattr(ours.options, name) for name in same] == [
            getattr(theirs.options, name) for name in same
        ]
        (rank,) = row["measured"]["ranks"]
        assert max(rank["largest"].values()) == measured_peak_bytes(recorded)


def test_every_goal_is_judged_for_both_halves_and_a_missed_one_says_so(evidence: Evidence, text: str) -> None:
    for half in Half:
        lines = judged(evidence.of(half))
        assert {line.goal for line in lines} == {"G1", "G2", "G3", "G4", "G5", "G7", "interval"}
        for line in lines:
            assert line.figure in text
            assert (line.met is None) == (line.count == 0)
        missed = sum(line.met is False for line in lines)
        assert text.count("**missed**") >= missed
    assert f"{evidence.coverage.measured} of the {evidence.coverage.cells} cells" in text


def test_the_document_names_all_that_was_asked_scored_and_left_out(evidence: Evidence, text: str) -> None:
    for rival in evidence.rivals:
        assert rival.rival.name in text and rival.rival.source in text
        assert (rival.errors.count if rival.errors else 0) + sum(n for _, n in rival.silent) == rival.rows
    assert all(each.row["id"] in text for each in evidence.published)
    assert all(name in text for group in evidence.left_out for name in group.rows)
    for case in evidence.cases:
        assert case.row["id"] in text
        assert case.agrees or case.row["explained"], f"{case.row['id']} differs without a word of why"


def test_no_published_row_is_scored_and_left_out(evidence: Evidence) -> None:
    scored = [each.row["id"] for each in evidence.published]
    left = [name for group in evidence.left_out for name in group.rows]
    assert len({*scored, *left}) == len(scored) + len(left)
    for each in evidence.published:
        assert each.row["source"] and each.row["outcome"] in ("ok", "oom")
        assert (each.percent is None) == (each.row["outcome"] == "oom")


def test_models_of_the_data_have_the_size_of_their_name() -> None:
    sizes = {"yi-6b": 6.06, "yi-34b": 34.4, "falcon-40b": 41.3, "opt-1.3b": 1.32, "deepseek-coder-33b": 33.3}
    machine = Machine(gpu="h200", gpus=1, host_memory_bytes=None)
    for name, billions in sizes.items():
        cell = {"gpu": "h200", "model": str(DATA / "models" / f"{name}.json"), "seq_len": 512}
        prediction = plan(cell, machine, name="size").prediction
        assert prediction.params / 1e9 == pytest.approx(billions, rel=0.02), name


def test_plots_are_drawn(found: tuple[Evidence, dict[str, Plot]], text: str) -> None:
    for name, plot in found[1].items():
        assert svg(plot).startswith("<svg")
        assert f"]({name})" in text


def _needing(measured: int, predicted: int) -> Score:
    row: dict[str, Any] = {
        "cell": {"model": "llama-3.2-1b"},
        "status": "completed",
        "measured": {"ranks": [{"rank": 0, "reserved": measured, "largest": {"forward": measured}}]},
        "predicted": {
            "peak_allocated_bytes": predicted,
            "peak_allocated_upper_bytes": predicted,
            "needed_bytes": predicted,
            "moments": {"between_steps": {}},
        },
    }
    row["measured"]["device_bytes"] = {"0": measured}
    found = score(Sourced(row=row, half=Half.TUNED, earlier=False))
    assert found is not None
    return found


@given(
    measured=st.integers(10**9, 10**11),
    shares=st.lists(st.floats(0.8, 1.25), min_size=2, max_size=2).map(sorted),
)
def test_a_larger_bound_refuses_more_and_passes_less(measured: int, shares: list[float]) -> None:
    lower, higher = (verdicts([_needing(measured, round(measured * share))]) for share in shares)
    assert lower.false_fits >= higher.false_fits
    assert lower.false_refusals <= higher.false_refusals
    assert lower.decisions == higher.decisions == len(LIMIT_PERCENTS)


def test_a_perfect_bound_errs_nowhere() -> None:
    seen = verdicts([_needing(10**10, 10**10)])
    assert (seen.false_fits, seen.false_refusals, seen.fitting) == (0, 0, len(LIMIT_PERCENTS) // 2)


@given(percents=st.lists(st.floats(-50, 50), min_size=1, max_size=30))
def test_a_spread_is_ordered(percents: list[float]) -> None:
    seen = spread(percents)
    assert seen is not None
    assert abs(seen.bias) <= seen.mean + 1e-9
    assert seen.mean <= seen.worst + 1e-9 and seen.p95 <= seen.worst


def test_words_leave_out_what_is_the_default() -> None:
    cell = {"gpus": 1, "model": "gpt2", "zero": 2, "seq_len": 256, "liger": False, "precision": "bf16"}
    assert words(cell) == "gpt2 length=256"


def test_each_difference_of_a_published_row_has_its_source(evidence: Evidence, text: str) -> None:
    told = {row["name"]: row for row in differences()}
    known = {*THROUGHOUT, *AT_LOSS, EXPANDABLE_SEGMENTS, MANY_LENGTHS}
    assert set(told) == known
    assert all(row["why"] in text and row["source"] in text for row in told.values())
    used = {name for each in evidence.published for name in each.row["differs"]}
    assert used == known
    for each in evidence.published:
        if each.percent is not None and not each.row["differs"]:
            assert each.mended_percent == each.percent


@pytest.mark.parametrize(("model", "followed"), [("llama-2-7b", 176_872), ("models/phi-1.5.json", 59_592)])
def test_litgpts_blocks_keep_what_was_seen_of_its_code(model: str, followed: int) -> None:
    """Bytes a token of one block of litgpt 0.3.1, run on the meta device under saved-tensor hooks."""
    cell = {"model": model, "gpu": "a100-40gb", "lora_rank": 8, "lora_targets": "q_proj,v_proj"}
    planned = _planned({**cell, "seq_len": 1024}, own_code=True)
    assert litgpt_block(planned.spec, sizes_of(planned.spec)) == pytest.approx(followed, rel=0.002)


def test_a_trace_that_began_inside_its_step_tells_of_no_component(evidence: Evidence) -> None:
    """What the forward pass made before it has no name in it: of fp16, whose peak came in the third step."""
    late = [each for each in evidence.scores if each.begins_late]
    assert len(late) == 3 and all(each.cell["precision"] == "fp16" for each in late)
    assert not any(each.at_peak for each in late)
    whole = next(each for each in evidence.of_design if each.at_peak)
    row: Row = msgspec.json.decode(msgspec.json.encode(whole.row))
    for event in row["measured"]["ranks"][0]["events"].values():
        if event.get("phase") == "forward":
            event["step"] -= 1
    found = score(Sourced(row=row, half=whole.half, earlier=False))
    assert found is not None and found.begins_late and not found.at_peak


def test_stage_0_is_named(evidence: Evidence) -> None:
    names = [each.name for each in evidence.of_design if each.cell["zero"] == 0]
    assert names and all(" zero=0 " in f"{name} " for name in names)

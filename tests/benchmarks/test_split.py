"""The held-out half: fixed before anything was looked at, and decided by the cell alone."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.accuracy.split import (
    LISTED,
    LISTED_MANY,
    LONGEST_TUNED,
    Half,
    family_of,
    half_of,
    listed_many,
    reasons,
    sha256_of,
)
from benchmarks.design import H200
from benchmarks.rows import Cell, key_of

SHA256 = "2cfb49575b87716c97fe38dd94c890c689b158ab936e6a393935a62a76f38355"
"""Of the list as it was committed first. A changed list is a new experiment, not a mended one."""
SHA256_MANY = "a831f785a625d7e60b7adcf94aacf08590f97da2664cfe68826250080467e56d"
"""Of that on four and eight GPUs, committed before any of its cells had run."""


def _listed() -> list[Cell]:
    return [json.loads(line) for line in LISTED.read_text().splitlines()]


def test_the_list_is_the_one_that_was_committed_first() -> None:
    assert sha256_of(LISTED) == SHA256
    assert sha256_of(LISTED_MANY) == SHA256_MANY


def test_every_cell_on_four_and_eight_gpus_is_held_out_and_none_is_in_both_lists() -> None:
    many = listed_many()
    assert {half_of(cell) for cell in many} == {Half.HELD_OUT}
    assert not {key_of(cell) for cell in many} & {key_of(cell) for cell in _listed()}


def test_every_listed_cell_is_held_out_however_its_options_are_ordered() -> None:
    order = random.Random(0)
    for cell in _listed():
        items = list(cell.items())
        order.shuffle(items)
        assert half_of(dict(items)) == half_of(cell) == Half.HELD_OUT


def test_the_list_has_two_families_four_times_the_length_and_two_gpus() -> None:
    alone = [cell for cell in _listed() if cell["gpus"] == 1]
    families = {family_of(cell["model"]) for cell in alone if "family" in reasons(cell)}
    assert families == {"mistral", "gpt_neox"}
    assert max(cell["seq_len"] for cell in alone) == 4 * LONGEST_TUNED
    assert any(cell["gpus"] == 2 for cell in _listed())


@pytest.mark.parametrize(
    ("change", "half"),
    [
        ({}, Half.TUNED),
        ({"gpus": 2}, Half.HELD_OUT),
        ({"seq_len": LONGEST_TUNED}, Half.TUNED),
        ({"seq_len": 2 * LONGEST_TUNED}, Half.HELD_OUT),
        ({"model": "mistral-7b"}, Half.HELD_OUT),
        ({"model": "phi-4"}, Half.HELD_OUT),
    ],
)
def test_one_change_decides(change: Cell, half: Half) -> None:
    assert half_of({"model": "llama-3.2-1b", **change}) == half


def test_both_halves_have_models_of_the_design() -> None:
    levels = next(axis for axis in H200.axes if axis.name == "model").names
    halves = {half_of({"model": name}) for name in levels}
    assert halves == set(Half)

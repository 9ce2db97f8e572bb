"""The built-in design: enough cells, every level of every axis, none twice, none that cannot run."""

from __future__ import annotations

import hashlib
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.accuracy.split import listed_many
from benchmarks.cells import plan
from benchmarks.design import (
    CPU,
    FLASH_HEAD_DIM,
    H200,
    LARGE,
    MANY,
    MANY_COUNTS,
    Drawn,
    Space,
    _points,
    counts,
    design,
    designed,
    fits,
    halton,
    sweeps,
)
from benchmarks.rows import Cell, key_of
from llmtop.presets.resolve import Machine

SEED = 1


@pytest.fixture(scope="module")
def drawn() -> dict[int, list[Drawn]]:
    return {gpus: design(SEED, gpus) for gpus in (1, 2)}


def test_the_design_is_large_enough_and_has_no_duplicates(drawn: dict[int, list[Drawn]]) -> None:
    cells = [each.cell for gpus in drawn for each in drawn[gpus]]
    assert len(cells) >= 150 and min(map(len, drawn.values())) >= 60
    assert len({key_of(cell) for cell in cells}) == len(cells)


@pytest.mark.parametrize("gpus", [1, 2])
def test_every_level_of_every_axis_appears(drawn: dict[int, list[Drawn]], gpus: int) -> None:
    seen = counts(drawn[gpus])
    for axis in H200.axes:
        for name in axis.names:
            assert seen[axis.name, name] >= H200.least_of_level, f"{axis.name} = {name}"


def test_any_beginning_is_worth_its_time(drawn: dict[int, list[Drawn]]) -> None:
    """A call that is cut short has seen most of what there is to see."""
    for cells in drawn.values():
        seen = counts(cells[: len(cells) // 2])
        everything = [(axis.name, name) for axis in H200.axes for name in axis.names]
        assert sum(key in seen for key in everything) >= 0.85 * len(everything)
        assert {"space"} < {each.origin for each in cells[:20]}


def test_no_cell_is_refused_or_too_large(drawn: dict[int, list[Drawn]]) -> None:
    for gpus, cells in drawn.items():
        machine = Machine(gpu="h200", gpus=gpus, host_memory_bytes=None)
        for each in cells:
            planned = plan({**each.cell, "gpu": "h200"}, machine, name="test")
            assert fits(planned, H200)
            if planned.spec.options.attention == "flash_attention_2":
                assert planned.spec.options.precision == "bf16"
                assert planned.spec.model.head_dim <= FLASH_HEAD_DIM


def test_families_heads_and_vocabularies_are_spread(drawn: dict[int, list[Drawn]]) -> None:
    machine = Machine(gpu="h200", gpus=1, host_memory_bytes=None)
    models = {
        planned.spec.model.name: planned.spec.model
        for each in drawn[1]
        if (planned := plan({**each.cell, "gpu": "h200"}, machine, name="test"))
    }.values()
    assert len({model.family for model in models}) >= 5
    assert {model.tied_embeddings for model in models} == {True, False}
    assert min(model.vocab_size for model in models) <= 32_000 < 256_000 <= max(m.vocab_size for m in models)
    assert len({model.num_heads / model.num_kv_heads for model in models}) >= 3


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_seed_decides(gpus: int) -> None:
    assert design(3, gpus, CPU) == design(3, gpus, CPU)
    assert design(3, gpus, CPU) != design(4, gpus, CPU)


@given(prime=st.sampled_from([2, 3, 5, 7, 11, 13]), seed=st.randoms(use_true_random=False))
def test_each_stretch_of_the_sequence_fills_the_interval_evenly(prime: int, seed: object) -> None:
    digits = [0, *seed.sample(range(1, prime), prime - 1)]  # type: ignore[attr-defined]
    values = [halton(index, prime, digits) for index in range(prime**2)]
    assert sorted(int(value * prime**2 + 1e-9) for value in values) == list(range(prime**2))


DRAWN_FROM = {
    ("h200", 1): "babd038f9a60770c87ee914815ee307e88209da59e3e8294eba92ffdca5ea143",
    ("h200", 2): "6e08f7fd5383dec4bbc7908fe3d3816348711509e17694859ca0534092dab994",
    ("cpu", 1): "70a9d7bd86f4bb1fbd0a9178c15aa1af4c668e2b21adedfe650335615e83dbd0",
    ("cpu", 2): "dbc1dc0939652b02e65b86022c6e4a49377c0f95473de3ebea09821a5702d77a",
}
"""SHA-256 of what the designs on one and two GPUs are drawn from: every sweep and the first 500 points. Which
of them can run is for the prediction to say, which is mended now and then; these are not."""


@pytest.mark.parametrize(("name", "gpus"), DRAWN_FROM)
def test_designs_for_more_gpus_leave_those_for_fewer_as_they_were(name: str, gpus: int) -> None:
    space = {"h200": H200, "cpu": CPU}[name]
    found = hashlib.sha256()
    for each in sweeps(gpus, space):
        found.update((each.origin + key_of(each.cell)).encode())
    for levels in islice(_points(SEED, space.axes), 500):
        found.update(repr({axis: level.name for axis, level in levels.items()}).encode())
    assert found.hexdigest() == DRAWN_FROM[name, gpus]


def test_the_list_for_four_and_eight_gpus_has_every_stage_offload_size_and_large_model() -> None:
    cells = listed_many()
    assert len({key_of(cell) for cell in cells}) == len(cells) >= 24
    for gpus in MANY_COUNTS:
        mine = [cell for cell in cells if cell["gpus"] == gpus]
        assert len(mine) >= 12
        assert {cell["zero"] for cell in mine} == {1, 2, 3}
        assert {(cell.get("offload_optimizer"), cell.get("offload_param")) for cell in mine} == {
            (None, None), ("cpu", None), ("cpu", "cpu"),
        }  # fmt: skip
        large = [cell for cell in mine if cell["model"] in LARGE.axes[0].names]
        assert {cell["model"] for cell in large} == set(LARGE.axes[0].names)
        assert mine[-len(large) :] == large
        for axis in MANY.axes:
            assert all(_has(mine, options) for options in _options_of(MANY, axis.name)), axis.name


def _options_of(space: Space, axis: str) -> list[dict[str, object]]:
    return [level.options for each in space.axes if each.name == axis for level in each.levels]


def _has(cells: list[Cell], options: dict[str, object]) -> bool:
    return any(options.items() <= cell.items() for cell in cells)


@pytest.mark.parametrize("gpus", MANY_COUNTS)
def test_every_listed_cell_can_run_on_such_a_machine(gpus: int) -> None:
    machine = Machine(gpu="h200", gpus=gpus, host_memory_bytes=None)
    for cell in (cell for cell in listed_many() if cell["gpus"] == gpus):
        planned = plan({**cell, "gpu": "h200"}, machine, name="test")
        space = LARGE if cell["model"] in LARGE.axes[0].names else MANY
        assert fits(planned, space), key_of(cell)
        assert planned.spec.world_size == gpus


@pytest.mark.parametrize("gpus", MANY_COUNTS)
def test_the_cpu_tries_out_as_many_ranks(gpus: int) -> None:
    cells = designed(SEED, gpus, on_cpu=True)
    assert {each.cell["gpus"] for each in cells} == {gpus}
    assert {each.cell["zero"] for each in cells} == {0, 1, 2, 3}

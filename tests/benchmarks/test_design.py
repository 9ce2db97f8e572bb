"""The built-in design: enough cells, every level of every axis, none twice, none that cannot run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cells import plan
from benchmarks.design import CPU, FLASH_HEAD_DIM, H200, Drawn, counts, design, fits, halton
from benchmarks.rows import key_of
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

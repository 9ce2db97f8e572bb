"""Where a run fits: the fewest GPUs, the fastest setting, energy, and what is short where it fits nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from llmtop.presets.catalog import load_recipe
from llmtop.presets.resolve import Layer, Machine, assemble
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.cost.sweep import Change, changed, judge
from llmtop.profiler.cost.where import GPU_COUNTS, Where, WhereRow, gpu_names, where

ALL = gpu_names()


def found(gpus: tuple[str, ...] = ALL, allow: tuple[str, ...] = (), recipe: str = "", **typed: Any) -> Where:
    layers = [Layer(ValueSource.COMMAND_LINE, "typed", typed)]
    if recipe:
        layers.append(Layer(ValueSource.RECIPE, recipe, load_recipe(recipe).values))

    def base_of(change: Change) -> RunSpec:
        machine = Machine(gpu="cpu", gpus=1, host_memory_bytes=None)
        return assemble([*layers, Layer(ValueSource.MACHINE, "", change)], name="asked", machine=machine)

    return where(base_of, gpus=gpus, allow=allow)


def row_of(rows: Where, gpu: str) -> WhereRow:
    return next(row for row in rows.rows if row.gpu == gpu)


def test_every_kind_of_gpu_is_there_once() -> None:
    assert "h100" not in ALL and "h100-80gb" in ALL and "cpu" not in ALL
    assert sorted(row.gpu for row in found(model="llama-3.1-8b").rows) == sorted(ALL)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-1.7b"])
def test_fewest_gpus_and_nothing_faster_among_what_was_searched(model: str) -> None:
    rows = found(("h100-80gb", "t4", "rtx-4090"), model=model)
    for row in rows.rows:
        machine = Machine(gpu="cpu", gpus=1, host_memory_bytes=None)
        typed = Layer(ValueSource.COMMAND_LINE, "", {"model": model, "gpu": row.gpu})
        base = assemble([typed], name="asked", machine=machine)
        for count in GPU_COUNTS:
            if row.gpus is not None and count > row.gpus:
                break
            for micro_batch in rows.space["micro_batch"]:
                change = {
                    "gpus": count,
                    "micro_batch": micro_batch,
                    "zero": 3,
                    "gradient_checkpointing": True,
                }
                judged = judge(changed(base, change), change)
                assert not isinstance(judged, tuple)
                if row.gpus is None or count < row.gpus:
                    assert not judged.brief.fits
                elif judged.brief.fits and not judged.brief.tight:
                    assert row.brief is not None and row.brief.tokens_per_second is not None
                    assert (judged.brief.tokens_per_second or 0) <= row.brief.tokens_per_second


def test_energy_is_the_boards_power_for_the_predicted_time() -> None:
    row = row_of(found(("h200",), model="llama-3.2-1b"), "h200")
    assert row.gpus == 1 and row.brief is not None and row.brief.tokens_per_second is not None
    hours = 1e6 / row.brief.tokens_per_second / 3600
    assert row.kwh_per_million_tokens == pytest.approx(0.7 * hours)


def test_where_nothing_fits_it_says_by_how_much() -> None:
    row = row_of(found(("t4",), model="llama-3.1-70b"), "t4")
    assert row.gpus is None and row.kwh_per_million_tokens is None
    assert row.brief is not None and row.brief.needed_bytes is not None and row.gpu_memory_bytes is not None
    assert row.short_bytes == row.brief.needed_bytes - row.gpu_memory_bytes > 0
    assert row.tried_gpus == 8 and "short" in row.why


def test_what_is_refused_everywhere_says_why() -> None:
    row = row_of(found(("t4",), model="llama-3.2-1b", attention="flash_attention_2"), "t4")
    assert row.gpus is None and row.brief is None and "Ampere" in row.why


def test_the_precision_is_one_that_the_gpu_has_unless_it_was_typed() -> None:
    asked: dict[str, Any] = {"offload_optimizer": "cpu", "offload_param": "cpu"}
    rows = found(("v100-32gb", "h200"), recipe="full-zero3", **asked)
    old, new = row_of(rows, "v100-32gb"), row_of(rows, "h200")
    assert old.settings["precision"] == "fp16" and new.settings["precision"] == "bf16"
    assert old.gpus is not None and rows.space["precision"] == ("fp16", "bf16")
    assert "precision" not in found(("h200",), recipe="full-zero3", **asked).space


def test_the_reason_is_that_of_the_setting_closest_to_what_was_asked() -> None:
    """Of the settings that are searched, three stages in four cannot offload weights."""
    asked: dict[str, Any] = {"offload_optimizer": "cpu", "offload_param": "cpu", "precision": "bf16"}
    row = row_of(found(("t4",), recipe="full-zero3", **asked), "t4")
    assert row.gpus is None and "bf16 needs compute capability 8.0" in row.why
    assert "--precision fp16" in row.why and "offload_param" not in row.why
    # The stage is a default here, which the search changes.
    defaults = row_of(found(("t4",), model="llama-3.2-1b", offload_param="cpu", precision="bf16"), "t4")
    assert "bf16" in defaults.why


def test_more_is_searched_only_where_it_is_allowed() -> None:
    asked: dict[str, Any] = {"model": "llama-3.1-8b"}
    assert set(found(("t4",), **asked).space) == {"micro_batch", "zero", "gradient_checkpointing"}
    rows = found(("rtx-4090",), ("offload", "8bit", "liger"), **asked)
    assert set(rows.space) >= {"offload_optimizer", "offload_param", "optimizer", "liger"}
    assert row_of(rows, "rtx-4090").gpus == 1
    assert row_of(found(("rtx-4090",), **asked), "rtx-4090").gpus != 1


def test_what_was_typed_is_kept_and_what_a_recipe_says_is_searched() -> None:
    rows = found(("h200",), recipe="full-zero2", micro_batch=2)
    assert "micro_batch" not in rows.space and "zero" in rows.space
    assert "zero" not in found(("h200",), recipe="full-zero2", zero=2).space


def test_the_fastest_first_and_what_fits_nowhere_last() -> None:
    rows = found(model="llama-3.1-8b").rows
    fitting = [row for row in rows if row.gpus is not None]
    assert rows[: len(fitting)] == tuple(fitting) and len(fitting) < len(rows)
    rates = [row.brief.tokens_per_second or 0 for row in fitting if row.brief is not None]
    assert rates == sorted(rates, reverse=True)


def test_a_typed_count_is_the_one_that_is_looked_at() -> None:
    typed = Layer(ValueSource.COMMAND_LINE, "typed", {"model": "llama-3.1-8b", "gpus": 2})
    machine = Machine(gpu="cpu", gpus=1, host_memory_bytes=None)

    def base_of(change: Change) -> RunSpec:
        return assemble([typed, Layer(ValueSource.MACHINE, "", change)], name="asked", machine=machine)

    rows = where(base_of, gpus=("h100-80gb", "t4"))
    assert row_of(rows, "h100-80gb").gpus == 2 and row_of(rows, "h100-80gb").settings["gpus"] == 2
    nowhere = row_of(rows, "t4")
    assert nowhere.tried_gpus == 2 and nowhere.why == "GPU memory is short on 2 GPUs"
    # A recipe's count is of its own kind of GPU.
    assert row_of(found(("h200",), recipe="full-zero2"), "h200").gpus == 1


@pytest.mark.parametrize("gpu", ["h200", "a100-80gb"])
def test_room_to_spare_wins_over_speed(gpu: str) -> None:
    row = row_of(found((gpu,), model="llama-3.1-8b"), gpu)
    assert row.brief is not None and row.brief.fits and not row.brief.tight
    # Twice as many sequences would fit too, and be faster, with hardly anything to spare.
    machine = Machine(gpu="cpu", gpus=1, host_memory_bytes=None)
    typed = Layer(ValueSource.COMMAND_LINE, "", {"model": "llama-3.1-8b", "gpu": gpu})
    change = {**row.settings, "micro_batch": 2 * row.settings["micro_batch"]}
    more = judge(changed(assemble([typed], name="asked", machine=machine), change), change)
    assert not isinstance(more, tuple) and more.brief.tight
    assert (more.brief.tokens_per_second or 0) > (row.brief.tokens_per_second or 0)

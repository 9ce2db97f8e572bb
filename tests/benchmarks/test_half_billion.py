"""The model of half a billion weights that benchmarks make without a network."""

from __future__ import annotations

from pathlib import Path

from benchmarks.halfbillion import installed_sources, settings, write_shape
from llmtop.presets import catalog
from llmtop.presets.resolve import Layer, Machine, recipe_layers, resolve
from llmtop.presets.spec import ValueSource
from llmtop.profiler.cost.shape import param_count

ONE_GPU = Machine(gpu="h200", gpus=1, host_memory_bytes=None)


def test_it_is_of_the_size_that_it_is_named_for(tmp_path: Path) -> None:
    shape = write_shape(tmp_path / "half-billion", settings(tiny=False)["shape"])
    assert 0.45e9 < param_count(catalog.load_model(str(shape)).shape) < 0.55e9


def test_its_settings_are_a_run(tmp_path: Path) -> None:
    for tiny in (False, True):
        chosen = settings(tiny=tiny)
        shape = write_shape(tmp_path / f"tiny-{tiny}", chosen["shape"])
        given = {**chosen["run"], "model": str(shape), "qat": "int8-int4", "qat_group": 32}
        layers = [
            *recipe_layers(catalog.load_recipe(chosen["recipe"])),
            Layer(ValueSource.COMMAND_LINE, "test", given),
        ]
        spec = resolve(layers, name="qat", machine=ONE_GPU)
        assert spec.weights_dir is None and spec.options.precision == "bf16"
        assert spec.options.qat == "int8-int4"


def test_the_text_is_the_same_each_time_and_no_longer_than_asked_for() -> None:
    texts = installed_sources(200_000)
    assert 200_000 <= sum(map(len, texts)) < 700_000
    assert texts == installed_sources(200_000) and all(texts)

"""Layers to a run spec: precedence, provenance, defaults that fit, and errors that name their place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtop.presets import catalog, option_values, resolve
from llmtop.presets.errors import UsageError
from llmtop.presets.resolve import Layer, Machine, assemble, parse_set
from llmtop.presets.spec import RunOptions, RunSpec, ValueSource

BOX = Machine(gpu="h100-80gb", gpus=8, host_memory_bytes=2**40)
LAPTOP = Machine(gpu="cpu", gpus=1, host_memory_bytes=16 * 2**30)


def run(*layers: Layer, machine: Machine = BOX, **values: Any) -> RunSpec:
    base = Layer(ValueSource.RECIPE, "test.toml", {"model": "llama-3.2-1b"} | values)
    return resolve.resolve([base, *layers], name="test", machine=machine)


def given_on_command_line(**values: Any) -> Layer:
    return Layer(ValueSource.COMMAND_LINE, "--option", values)


def refused(*layers: Layer, machine: Machine = BOX, **values: Any) -> str:
    with pytest.raises(UsageError) as caught:
        run(*layers, machine=machine, **values)
    return str(caught.value)


def test_the_stronger_layer_wins_in_any_order() -> None:
    file = Layer(ValueSource.DEEPSPEED_CONFIG, "ds.json", {"zero": 3, "grad_accum": 4})
    typed = given_on_command_line(zero=1)
    spec = resolve.resolve(
        [typed, file, Layer(ValueSource.RECIPE, "r.toml", {"model": "gpt2", "zero": 2, "steps": 5})],
        name="mixed",
        machine=BOX,
    )
    assert (spec.options.zero, spec.options.grad_accum, spec.options.steps) == (1, 4, 5)
    assert spec.provenance["zero"].source is ValueSource.COMMAND_LINE
    assert spec.provenance["grad_accum"].detail == "ds.json"
    assert spec.provenance["steps"].source is ValueSource.RECIPE
    assert spec.provenance["seed"].source is ValueSource.DEFAULT
    assert set(spec.provenance) >= set(RunOptions.__struct_fields__)
    assert spec.name == "mixed"


def test_of_equal_layers_the_later_wins() -> None:
    assert run(given_on_command_line(zero=1), given_on_command_line(zero=3)).options.zero == 3


def test_raw_deepspeed_keys_merge_to_any_depth() -> None:
    spec = run(
        Layer(ValueSource.DEEPSPEED_CONFIG, "ds.json", {"deepspeed": {"zero_optimization": {"a": 1}}}),
        given_on_command_line(deepspeed={"zero_optimization": {"b": [1]}}),
        deepspeed={"zero_optimization": {"a": 0, "c": True}, "aio": {"block_size": 9}},
    )
    assert spec.options.deepspeed == {
        "zero_optimization": {"a": 1, "b": [1], "c": True},
        "aio": {"block_size": 9},
    }
    assert spec.provenance["deepspeed.zero_optimization.a"].source is ValueSource.DEEPSPEED_CONFIG
    assert spec.provenance["deepspeed.zero_optimization.b"].source is ValueSource.COMMAND_LINE
    assert spec.provenance["deepspeed.aio.block_size"].source is ValueSource.RECIPE


def test_the_machine_fills_what_nobody_chose() -> None:
    spec = run()
    assert (spec.gpu.name, spec.options.gpu, spec.options.gpus) == ("h100-80gb", "h100-80gb", 8)
    assert spec.provenance["gpu"].source is ValueSource.MACHINE
    assert run(gpus=2).options.gpus == 2
    elsewhere = run(gpu="h200")
    assert (elsewhere.options.gpus, elsewhere.gpu.name) == (1, "h200")
    assert run(gpu="h100").options.gpu == "h100-80gb"


def test_the_cpu_kind_has_the_memory_of_the_machine() -> None:
    assert run(machine=LAPTOP).gpu.memory_bytes == LAPTOP.host_memory_bytes
    assert run(gpu="cpu").gpu.memory_bytes == BOX.host_memory_bytes
    nothing_known = Machine(gpu="cpu", gpus=1, host_memory_bytes=None)
    assert run(machine=nothing_known).gpu.memory_bytes is None


def test_a_device_without_a_preset_is_taken_as_it_describes_itself() -> None:
    odd = Machine(
        gpu="a6000-ada", gpus=2, host_memory_bytes=None, gpu_memory_bytes=48 << 30, compute_capability="8.9"
    )
    gpu = run(machine=odd).gpu
    assert (gpu.name, gpu.memory_bytes, gpu.compute_capability) == ("a6000-ada", 48 << 30, "8.9")
    assert gpu.dense_flops_per_second == {} and gpu.memory_bandwidth_bytes_per_second is None


def test_defaults_that_fit_the_hardware_and_the_model() -> None:
    assert run().options.precision == "bf16"
    assert run(gpu="t4").options.precision == "fp16"
    assert run(machine=LAPTOP).options.precision == "fp32"
    assert run(model="gemma-2-2b").options.attention == "eager"
    assert run(model="gpt2").options.seq_len == 1024
    told = run(model="gemma-2-2b").provenance["attention"]
    assert told.source is ValueSource.DEFAULT and "gemma2" in told.detail
    assert "seq_len = 2048" in refused(model="gpt2", seq_len=2048)
    assert "bf16" in refused(gpu="t4", precision="bf16")


def test_every_recipe_resolves_on_a_gpu_box() -> None:
    for entry in catalog.entries("recipes"):
        recipe = catalog.load_recipe(entry.name)
        spec = resolve.resolve(resolve.recipe_layers(recipe), name=recipe.name, machine=BOX)
        assert spec.provenance["model"].detail == recipe.sources["model"]
        assert msgspec.json.decode(msgspec.json.encode(spec), type=RunSpec) == spec


def test_the_cpu_demo_needs_no_gpu() -> None:
    recipe = catalog.load_recipe("cpu-demo")
    spec = resolve.resolve(resolve.recipe_layers(recipe), name=recipe.name, machine=LAPTOP)
    assert spec.on_cpu and spec.world_size == 2
    assert (spec.options.zero, spec.options.precision, spec.options.attention) == (2, "fp32", "sdpa")
    assert not spec.options.save_at_end


def test_without_a_model_both_ways_are_named() -> None:
    with pytest.raises(UsageError, match="--model"):
        resolve.resolve([], name="x", machine=BOX)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"micro_bach": 2}, ("test.toml: unknown key 'micro_bach'", "'micro_batch'")),
        ({"micro_batch": "2"}, ("test.toml: micro_batch = '2'", "a whole number of 1 or more")),
        ({"micro_batch": 0}, ("micro_batch = 0", "of 1 or more")),
        ({"zero": 4}, ("zero = 4", "from 0 to 3")),
        ({"precision": "bf-16"}, ("precision", "did you mean 'bf16'")),
        ({"attention": "flash_attention2"}, ("did you mean 'flash_attention_2'",)),
        ({"liger": "yes"}, ("liger = 'yes'", "true or false")),
        ({"learning_rate": float("nan")}, ("learning_rate",)),
        ({"adam_beta1": 1}, ("adam_beta1", "below 1")),
        ({"deepspeed": {"a": float("inf")}}, ("deepspeed.a", "finite")),
        ({"deepspeed": {"a": 2**80}}, ("deepspeed.a", "64 bits")),
        (
            {"deepspeed": {"zero_optimization": {"reduce_bucket_size": "big"}}},
            ("reduce_bucket_size", "'big'"),
        ),
        ({"model": "llama-3.2-1bb"}, ("llama-3.2-1b",)),
        ({"gpu": "h300"}, ("h200",)),
    ],
)
def test_wrong_values_name_layer_key_value_and_mend(values: dict[str, Any], words: tuple[str, ...]) -> None:
    told = refused(**values)
    for word in words:
        assert word in told


@pytest.mark.parametrize("key", ["model", "data", "tokenizer", "nvme_path", "deepspeed_config"])
@pytest.mark.parametrize("path", ["x" * 256, "a/" * 2048, "a\0b", "ä" * 128])
def test_what_no_system_takes_for_a_path_is_refused(key: str, path: str) -> None:
    with pytest.raises(UsageError, match=f"{key} = .* is not valid"):
        option_values.check(key, path, "recipe.toml")
    assert option_values.check(key, "x" * 255, "recipe.toml") == "x" * 255


def test_texts_are_parsed_on_the_command_line_only() -> None:
    spec = run(given_on_command_line(micro_batch="2", learning_rate="1e-4", liger="true", lora_alpha="none"))
    assert (spec.options.micro_batch, spec.options.learning_rate) == (2, 1e-4)
    assert spec.options.liger and spec.options.lora_alpha is None


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("micro_batch=2", {"micro_batch": 2}),
        ("micro-batch=2", {"micro_batch": 2}),
        ("steps=2e3", {"steps": 2000}),
        ("steps=2.0", {"steps": 2}),
        ("learning_rate=3", {"learning_rate": 3.0}),
        ("liger=true", {"liger": True}),
        ("liger=False", {"liger": False}),
        ("lora_alpha=none", {"lora_alpha": None}),
        ("offload_param=none", {"offload_param": "none"}),
        ("data=123", {"data": "123"}),
        ("data=a=b", {"data": "a=b"}),
        ("deepspeed.zero_optimization.reduce_bucket_size=2e8", {"reduce_bucket_size": 200_000_000}),
        ("deepspeed.zero_optimization.overlap_comm=true", {"overlap_comm": True}),
        ("deepspeed.zero_optimization.x=null", {"x": None}),
        ("deepspeed.zero_optimization.x=none", {"x": "none"}),
        ("deepspeed.zero_optimization.x=[0.9, 0.95]", {"x": [0.9, 0.95]}),
        ('deepspeed.zero_optimization.x="true"', {"x": "true"}),
        ("deepspeed.zero_optimization.x=NaN", {"x": "NaN"}),
        ("deepspeed.zero_optimization.x=1e-5", {"x": 1e-5}),
    ],
)
def test_settings_are_read_by_the_type_of_their_key(text: str, values: dict[str, Any]) -> None:
    read = parse_set(text)
    if text.startswith("deepspeed"):
        read = read["deepspeed"]["zero_optimization"]
    assert read == values
    assert [type(value) for value in read.values()] == [type(value) for value in values.values()]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("micro_batch", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("a..b=3", "KEY=VALUE"),
        ("micro_bach=3", "did you mean 'micro_batch'"),
        ("micro_batch=2.5", "a whole number"),
        ("micro_batch=" + "9" * 40, "a whole number"),
        ("liger=maybe", "true or false"),
        ("model.hidden_size=3", "a key of the model cannot be set"),
        ("hf_config.vocab_size=3", "cannot be set"),
        ("gpu.memory_bytes=3", "a key of the gpu cannot be set"),
        ("steps.more=3", "no keys below it"),
        ("deepsped.zero_optimization.stage=3", "did you mean 'deepspeed.zero_optimization.stage'"),
        ("zero_optimization.stage=3", "did you mean 'deepspeed.zero_optimization.stage'"),
        ("some_thing=3", "llmtop plan --help lists the options"),
        ("deepspeed={}", "name the key in it"),
        ("deepspeed.x=1e999", "finite"),
    ],
)
def test_settings_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_set(text)
    assert words in str(caught.value)
    assert text[:20] in str(caught.value)


_RAW = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**60), 2**60),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=10),
        st.sampled_from(["true", "1e8", "null", " 1", '"x"', "[1]", "NaN", "auto", ""]),
    ),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(_RAW)
def test_raw_text_is_read_back_as_it_was(value: Any) -> None:
    assert option_values.raw_value(option_values.raw_text(value)) == value


@given(st.text(max_size=40))
def test_any_setting_is_values_or_an_error(text: str) -> None:
    try:
        values = parse_set(text)
    except UsageError as refusal:
        assert refusal.what
    else:
        assert len(values) == 1


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 5),
    st.floats(),
    st.sampled_from(["none", "cpu", "nvme", "bf16", "fp32", "sdpa", "eager", "gpt2", "auto", "2", "h200"]),
    st.text(max_size=5),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


@settings(max_examples=300)
@given(
    recipe=st.dictionaries(st.sampled_from(sorted(RunOptions.__struct_fields__)), _VALUES, max_size=4),
    typed=st.dictionaries(st.sampled_from(sorted(RunOptions.__struct_fields__)), _VALUES, max_size=3),
)
def test_any_layers_are_a_spec_or_an_error(recipe: dict[str, Any], typed: dict[str, Any]) -> None:
    layers = [
        Layer(ValueSource.RECIPE, "r.toml", {"model": "tinyllama-1.1b", **recipe}),
        Layer(ValueSource.COMMAND_LINE, "--x", typed),
    ]
    try:
        spec = assemble(layers, name="any", machine=LAPTOP)
    except UsageError as refusal:
        assert refusal.what
    else:
        # Strict both ways: what came out is what a run directory can hold and give back.
        assert msgspec.json.decode(msgspec.json.encode(spec), type=RunSpec) == spec

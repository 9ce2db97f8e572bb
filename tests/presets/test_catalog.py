"""The catalogue: what is built in, what a person adds, and errors that name file, line and nearest name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.presets import catalog, presetfiles
from llmtop.presets.errors import UsageError
from llmtop.presets.spec import GpuSpec
from llmtop.presets.toml_file import TomlFile
from llmtop.profiler.cost.shape import param_count
from tests.presets.family_cases import CASES
from tests.presets.refusing import refused

MODELS = {
    "tiny-llama-cpu": 1_746_624,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "phi-4": 14_659_507_200,
    "gpt2": 124_439_808,
    "pythia-1b": 1_011_781_632,
    "pythia-6.9b": 6_857_302_016,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "phi-3-mini": 3_821_079_552,
    "phi-4-mini": 3_836_021_760,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "bloom-560m": 559_214_592,
    "falcon-7b": 6_921_720_704,
    "starcoder2-3b": 3_030_371_328,
    "olmo-2-7b": 7_298_617_344,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "glm-4-9b": 9_400_279_040,
    "granite-3.1-2b": 2_533_531_648,
    "smollm3-3b": 3_075_098_624,
    "gpt-oss-20b": 20_914_757_184,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
}
"""Parameters as the models' authors or their files give them."""

GPUS = {
    *("cpu", "t4", "v100-16gb", "v100-32gb", "rtx-3090", "rtx-4090", "rtx-5090", "a10g", "l4", "l40s"),
    *("a100-40gb", "a100-80gb", "h100-80gb", "h100", "h200", "b200"),
}
RECIPES = {
    *("cpu-demo", "naive-fp32", "full-zero1", "full-zero2", "full-zero3", "zero3-offload-optimizer"),
    *("zero3-offload", "zero3-nvme", "lora", "qlora-nf4", "long-context-16k"),
    *("full-adam-8bit", "lora-int8", "qat-int8-int4"),
}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of a person's own presets."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "llmtop" / "presets"
    for kind in ("models", "gpus", "recipes"):
        (folder / kind).mkdir(parents=True)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_model_presets_have_their_published_size(name: str) -> None:
    model = catalog.load_model(name)
    assert param_count(model.shape) == MODELS[name]
    assert model.shape.name == name
    assert model.weights_dir is None
    assert model.source.endswith(f"{name}.toml")
    file = TomlFile(Path(model.source))
    assert file.text("source") and file.text("license")


def test_entries_list_everything_with_a_description() -> None:
    assert {entry.name for entry in catalog.entries("models")} == set(MODELS)
    assert {entry.name for entry in catalog.entries("gpus")} == GPUS
    assert {entry.name for entry in catalog.entries("recipes")} == RECIPES
    for kind in get_args(presetfiles.Kind):
        for entry in catalog.entries(kind):
            assert entry.description and Path(entry.path).is_file()


@pytest.mark.parametrize("name", sorted(GPUS - {"cpu"}))
def test_gpu_figures_are_dense_and_sourced(name: str) -> None:
    gpu = catalog.load_gpu(name)
    flops = gpu.dense_flops_per_second
    assert gpu.memory_bytes is not None and gpu.memory_bandwidth_bytes_per_second is not None
    assert flops["fp16"] > flops["fp32"]
    if "fp8" in flops:
        assert flops["fp8"] == pytest.approx(2 * flops["fp16"], rel=0.02)
    assert ("bf16" in flops) == (float(gpu.compute_capability or 0) >= 8)
    measured = {
        key for key in GpuSpec.__struct_fields__ if getattr(gpu, key) not in (None, {}, "cuda", gpu.name)
    } - {"sources", "torch_with_cuda"}
    assert set(gpu.sources) == measured


def test_known_gpu_figures() -> None:
    h200 = catalog.load_gpu("h200")
    assert h200.memory_bytes == 150_754_820_096
    assert h200.nvlink_bytes_per_second == 450e9
    assert catalog.load_gpu("H100") == catalog.load_gpu("h100-80gb")
    cpu = catalog.load_gpu("cpu")
    assert cpu.kind == "cpu" and cpu.memory_bytes is None and cpu.dense_flops_per_second == {}


@pytest.mark.parametrize(
    ("call", "name", "nearest"),
    [
        (catalog.load_model, "llama3.1-8b", "llama-3.1-8b"),
        (catalog.load_model, "Qwen2.5-05b", "qwen2.5-0.5b"),
        (catalog.load_gpu, "h20", "h200"),
        (catalog.load_gpu, "rtx4090", "rtx-4090"),
        (catalog.load_recipe, "cpu_demo", "cpu-demo"),
        (catalog.load_recipe, "full-zero4", "full-zero"),
    ],
)
def test_an_unknown_name_gets_the_nearest(call: Any, name: str, nearest: str) -> None:
    told = str(refused(call, name))
    assert f"'{name}'" in told and nearest in told


@pytest.mark.parametrize(
    "name", ["../gpus/h200", "/etc/passwd", "", "a b", "..", "h200\n", "\0", "~nobody", "x" * 300]
)
def test_a_name_is_never_a_way_out_of_the_folders(name: str) -> None:
    refused(catalog.load_gpu, name)
    refused(catalog.load_recipe, name)
    refused(catalog.load_recipe, name + ".toml")
    if name != "..":
        refused(catalog.load_model, name)


@pytest.mark.parametrize("name", ["sp ace", "ünï"])
def test_a_preset_that_cannot_be_named_is_not_suggested(name: str, mine: Path) -> None:
    (mine / "gpus" / f"{name}.toml").write_text("memory_bytes = 7\n")
    for call in (name, f"{name}x"):
        assert "did you mean" not in refused(catalog.load_gpu, call).fix


def test_own_presets_win(mine: Path) -> None:
    (mine / "gpus" / "h200.toml").write_text('description = "mine"\nmemory_bytes = 7\n')
    assert catalog.load_gpu("h200").memory_bytes == 7
    (mine / "models" / "house.toml").write_text(
        'description = "ours"\n[config]\n'
        + "\n".join(f"{k} = {json.dumps(v)}" for k, v in CASES["llama"].items())
    )
    assert catalog.load_model("house").shape.hidden_size == 48
    listed = {entry.name: entry.path for entry in catalog.entries("gpus")}
    assert listed["h200"].startswith(str(mine)) and not listed["h100"].startswith(str(mine))


def test_a_relative_config_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert presetfiles.user_presets_dir() == tmp_path / ".config" / "llmtop" / "presets"


def test_a_recipe_refines_one_base(mine: Path) -> None:
    recipe = catalog.load_recipe("zero3-offload")
    assert recipe.values["offload_param"] == "cpu"
    assert recipe.values["zero"] == 3
    assert recipe.values["model"] == "llama-3.1-8b"
    assert Path(recipe.sources["offload_param"]).name == "zero3-offload.toml"
    assert Path(recipe.sources["offload_optimizer"]).name == "zero3-offload-optimizer.toml"
    assert Path(recipe.sources["model"]).name == "full-zero1.toml"
    (mine / "recipes" / "cpu-demo.toml").write_text('description = "mine"\nbase = "cpu-demo"\nsteps = 3\n')
    own = catalog.load_recipe("cpu-demo")
    assert (own.values["steps"], own.values["model"]) == (3, "tiny-llama-cpu")


def test_raw_deepspeed_keys_of_a_base_are_merged(mine: Path) -> None:
    (mine / "recipes" / "a.toml").write_text(
        'description = "a"\nmodel = "gpt2"\n[deepspeed.zero_optimization]\nreduce_bucket_size = 5\n'
    )
    (mine / "recipes" / "b.toml").write_text(
        'description = "b"\nbase = "a"\n[deepspeed.zero_optimization]\noverlap_comm = true\n'
    )
    recipe = catalog.load_recipe("b")
    assert recipe.values["deepspeed"] == {
        "zero_optimization": {"reduce_bucket_size": 5, "overlap_comm": True}
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('description = "x"\nmicro_bach = 2\n', (":2:", "'micro_bach'", "'micro_batch'")),
        ('description = "x"\n\nmicro_batch = "two"\n', (":3:", "micro_batch", "'two'", "a whole number")),
        ('description = "x"\nmicro_batch = 2.0\n', (":2:", "micro_batch", "2.0")),
        ('description = "x"\nprecision = "bf-16"\n', (":2:", "did you mean 'bf16'")),
        ('description = "x"\nlearning_rate = inf\n', (":2:", "learning_rate")),
        ('description = "x"\nsteps = true\n', (":2:", "steps")),
        (f'description = "x"\nsteps = {10**30}\n', (":2:", "steps")),
        ('description = "x"\ndeepspeed = 3\n', (":2:", "a table of DeepSpeed keys")),
        ('description = "x"\n[deepspeed]\nwhen = 2020-01-01\n', (":2:", "deepspeed.when")),
        ('description = "x"\nzero = \n', (":2:", "not valid TOML")),
        ('description = "x"\n"', ("not valid TOML",)),
        ("description = 3\n", (":1:", "description")),
        ('description = "x"\nbase = "nobody"\n', (":2:", "'nobody'")),
        ('description = "x"\nbase = "own"\n', (":2:", "leads back")),
        ('description = "x"\nbase = 3\n', (":2:", "base")),
    ],
)
def test_ill_recipes_name_file_line_and_mend(text: str, words: tuple[str, ...], mine: Path) -> None:
    path = mine / "recipes" / "own.toml"
    path.write_text(text)
    told = str(refused(catalog.load_recipe, "own"))
    assert str(path) in told
    for word in words:
        assert word in told
    assert told == str(refused(catalog.load_recipe, str(path))) or "base" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('description = "x"\nmemory = 3\n', (":2:", "memory_bytes")),
        ('description = "x"\nmemory_bytes = "80"\n', (":2:", "memory_bytes")),
        ('description = "x"\nmemory_bytes = -1\n', (":2:", "memory_bytes")),
        ('description = "x"\npcie_bytes_per_second = inf\n', ("pcie_bytes_per_second",)),
        ('description = "x"\nkind = "tpu"\n', (":2:", "kind")),
        ('description = "x"\n[dense_flops_per_second]\nbf17 = 1e12\n', (":3:", "bf16")),
        ('description = "x"\n[sources]\nmemory = "seen"\n', (":3:", "memory_bytes")),
        ("[dense_flops_per_second]\nbf16 = 0\n", (":2:", "bf16 = 0 ", "from 1e+06")),
        ("[dense_flops_per_second]\nbf16 = -9e14\n", (":2:", "bf16 = -9")),
        ("[dense_flops_per_second]\nfp32 = nan\n", ("fp32", "finite")),
        ("[dense_flops_per_second]\nfp32 = true\n", (":2:", "fp32")),
        ('[dense_flops_per_second]\nfp32 = "many"\n', (":1:", "dense_flops_per_second")),
        ("nvlink_bytes_per_second = 1e-300\n", (":1:", "nvlink_bytes_per_second")),
        ('compute_capability = "abc"\n', (":1:", "compute_capability = 'abc'", '"9.0"')),
        ('compute_capability = "8.6.1"\n', (":1:", "compute_capability")),
        ('compute_capability = "nan.0"\n', (":1:", "compute_capability")),
        ('compute_capability = "-1.0"\n', (":1:", "compute_capability")),
        ('compute_capability = "9"\n', (":1:", "compute_capability")),
        ("compute_capability = 9.0\n", (":1:", "compute_capability")),
        ('alias_of = "nothing"\n', (":1:", "'nothing'")),
        ('alias_of = "own"\n', (":1:", "'own'")),
    ],
)
def test_ill_gpus_name_file_line_and_mend(text: str, words: tuple[str, ...], mine: Path) -> None:
    (mine / "gpus" / "own.toml").write_text(text)
    told = str(refused(catalog.load_gpu, "own"))
    for word in ("own.toml", *words):
        assert word in told


def test_ill_models_name_file_and_key(mine: Path) -> None:
    path = mine / "models" / "own.toml"
    path.write_text('description = "x"\nconfg = 3\n')
    assert "'config'" in str(refused(catalog.load_model, "own"))
    path.write_text('description = "x"\n[config]\nmodel_type = "llama"\n')
    assert "hidden_size" in str(refused(catalog.load_model, "own"))


_TOML_LINES = st.lists(
    st.one_of(
        st.sampled_from(
            ['description = "x"', "zero = 3", 'base = "lora"', "[deepspeed]", "steps = -1", 'model = "gpt2"']
        ),
        st.text(alphabet="abz_=[]\"'.{}#10 \t", max_size=14),
    ),
    max_size=6,
)


@given(_TOML_LINES)
def test_any_recipe_file_is_a_recipe_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text("\n".join(lines))
    try:
        recipe = catalog.load_recipe(str(path))
    except UsageError as refusal:
        assert refusal.what
    else:
        assert set(recipe.sources) == set(recipe.values)


BROKEN = {
    "syntax": "zero = \n",
    "key": "micro_bach = 2\n",
    "table": "config = 3\nsources = 3\nsteps = true\n",
    "two words": "",
}


@pytest.mark.parametrize("kind", get_args(presetfiles.Kind))
def test_a_broken_preset_is_listed_with_its_error_and_hides_none(kind: presetfiles.Kind, mine: Path) -> None:
    built_in = {entry.name for entry in catalog.entries(kind)}
    for name, text in BROKEN.items():
        (mine / kind / f"{name}.toml").write_text(text)
    (mine / kind / "bytes.toml").write_bytes(b"\xff\xfe")
    listed = {entry.name: entry for entry in catalog.entries(kind)}
    broken = {*BROKEN, "bytes"}
    assert set(listed) == built_in | broken
    for name, entry in listed.items():
        assert bool(entry.error) == (name in broken)
        assert entry.description.startswith("broken: ") == bool(entry.error)


def test_a_recipe_needs_no_description(mine: Path) -> None:
    (mine / "recipes" / "own.toml").write_text('model = "gpt2"\nsteps = 3\n')
    assert catalog.load_recipe("own").description == ""
    (entry,) = (entry for entry in catalog.entries("recipes") if entry.name == "own")
    assert not entry.error


@pytest.mark.parametrize(
    ("call", "name", "fix"),
    [
        (catalog.load_recipe, "llama-3.1-8b", "--model llama-3.1-8b"),
        (catalog.load_recipe, "h200", "--gpu h200"),
        (
            catalog.load_recipe,
            "some/config.json",
            "of a model: --model some/config.json; of DeepSpeed: --deepspeed-config some/config.json",
        ),
        (catalog.load_model, "cpu-demo", "llmtop plan cpu-demo"),
        (catalog.load_gpu, "gpt2", "--model gpt2"),
    ],
)
def test_a_name_of_another_kind_is_told_as_such(call: Any, name: str, fix: str) -> None:
    assert refused(call, name).fix == fix


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("ds.json", '{"zero_optimization": {"stage": 2}}', "--deepspeed-config"),
        ("config.json", '{"model_type": "llama"}', "--model"),
        ("other.json", '{"some": 1}', "neither a model nor DeepSpeed"),
        ("README.md", "# text", "a recipe is a TOML file"),
        ("train.py", "import torch", "llmtop run -- python train.py"),
        ("train.sh", "torchrun train.py", "llmtop run -- bash train.sh"),
    ],
)
def test_a_file_in_the_place_of_a_recipe_is_told_by_what_it_holds(
    name: str, text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        catalog.load_recipe(name)
    assert told in str(caught.value)

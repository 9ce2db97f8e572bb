"""Targets that say what a run is to be: recipes, presets, configurations, options, figures of the machine."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.fuzzing.making import NUMBERS, TEXTS, Maker, tree_of
from benchmarks.fuzzing.target import HERE, Target
from llmtop.presets import catalog, option_values, presetfiles
from llmtop.presets.errors import LlmtopError
from llmtop.presets.hf import tracing
from llmtop.presets.resolve import Layer, parse_set, recipe_layers, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.cost import calibration
from llmtop.profiler.cost.sweep import parse_axes
from llmtop.profiler.memory.predict import predict, predict_brief
from llmtop.profiler.memory.result import Prediction
from llmtop.trainer.change.plan import plan_change
from llmtop.trainer.dsconfig import deepspeed_config
from llmtop.trainer.dsimport.read import import_config
from llmtop.trainer.hosts import hostfile
from llmtop.tui.commands.plan_text import plan_text
from tests.presets.family_cases import CASES
from tests.trainer.ds_causes import CAUSES

MODEL = "llama-3.2-1b"
_CLOSELY = 16
"""One in so many is predicted to the end, the others in short."""


@cache
def _recipe_lines() -> dict[str, list[tuple[str, str]]]:
    return {path.name: _lines(path) for path in sorted((presetfiles.BUILT_IN / "recipes").glob("*.toml"))}


def _lines(path: Path) -> list[tuple[str, str]]:
    pairs = [line.partition(" = ") for line in path.read_text().splitlines() if line.strip()]
    return [(key, value) for key, _, value in pairs]


def settled(values: Mapping[str, Any], *, layers: list[Layer] | None = None) -> RunSpec:
    """A run as `plan` settles it, with what it prints."""
    asked = Layer(ValueSource.COMMAND_LINE, "the case", dict(values))
    spec = resolve([*(layers or []), asked], name="case", machine=HERE)
    return looked_at(spec, closely=hash(str(values)) % _CLOSELY == 0)


def looked_at(spec: RunSpec, *, closely: bool = False) -> RunSpec:
    """Predicted, printed and written out."""
    brief = predict_brief(spec)
    assert brief.needed_bytes is None or brief.needed_bytes >= 0
    if closely:
        prediction = predict(spec)
        assert plan_text(spec, prediction)
        msgspec.json.decode(msgspec.json.encode(prediction), type=Prediction)
        deepspeed_config(spec)
    msgspec.json.decode(msgspec.json.encode(spec), type=RunSpec)
    return spec


# --- recipes and presets of the user -----------------------------------------------------------------


def _make_recipe(maker: Maker, folder: Path) -> None:
    lines = list(maker.draw.choice(list(_recipe_lines().values())))
    for _ in range(maker.draw.randrange(3)):
        lines.append((maker.draw.choice(list(option_values.field_types())), maker.toml_value()))
    (folder / "recipe.toml").write_bytes(maker.toml_of(lines))


def _act_recipe(folder: Path) -> None:
    recipe = catalog.load_recipe(str(folder / "recipe.toml"))
    settled({"model": MODEL}, layers=recipe_layers(recipe))


def _presets_of(folder: Path, kind: str) -> Path:
    own = presetfiles.user_presets_dir() / kind
    own.mkdir(parents=True, exist_ok=True)
    for file in own.iterdir():
        file.unlink()
    return own / "mine.toml"


def _make_preset(kind: str) -> Any:
    def make(maker: Maker, folder: Path) -> None:
        path = maker.draw.choice(sorted((presetfiles.BUILT_IN / kind).glob("*.toml")))
        _presets_of(folder, kind).write_bytes(maker.toml_of(_lines(path)))

    return make


def _act_gpu(folder: Path) -> None:
    settled({"model": MODEL, "gpu": "mine", "gpus": 2})


def _act_model(folder: Path) -> None:
    settled({"model": "mine"})


# --- configurations of others -------------------------------------------------------------------------


def _no_tracing(place: Path) -> None:
    """Without torch an architecture that has no formulas is refused at once, not traced in seconds."""
    tracing._PACKAGES = ("no such package", "none either")


def _make_hf(maker: Maker, folder: Path) -> None:
    config = dict(maker.draw.choice(list(CASES.values())))
    if maker.chance(0.2):
        config = {
            "text_config": config,
            "model_type": maker.draw.choice(("llava", "gemma3", "qwen2_vl", "x")),
        }
    (folder / "config.json").write_bytes(maker.json_of(maker.spoilt(config)))


def _act_hf(folder: Path) -> None:
    settled({"model": str(folder / "config.json")})


def _make_ds(maker: Maker, folder: Path) -> None:
    config = maker.draw.choice([cause[0] for cause in CAUSES.values()])
    content = maker.json_of(maker.spoilt(config) if maker.chance(0.9) else maker.anything(5))
    if maker.chance(0.1):
        content = content.replace(b",", maker.draw.choice((b"\n", b", # c\n", b",,", b", /* c */ ")))
    (folder / "ds.json").write_bytes(content)


def _act_ds(folder: Path) -> None:
    imported = import_config(folder / "ds.json", world_size=2)
    msgspec.json.encode(imported)
    settled({"model": MODEL, **imported.values})


# --- options, changes and axes as typed -----------------------------------------------------------------


def _word(maker: Maker) -> str:
    if maker.chance(0.5):
        return maker.draw.choice(_PLAUSIBLE)
    key = maker.draw.choice(
        (*option_values.field_types(), "deepspeed.a.b", "deepspeed.zero_optimization.stage")
    )
    value = maker.draw.choice(
        (*NUMBERS, *TEXTS, "1..64", "a|b", "2,4", "4k", "[1,2", "{", '"x"', "4", "8", "2")
    )
    word = maker.draw.choice(
        (f"{key}={value}", f"{key}={value}", f"{key}", f"{value}={key}", f"{key}.x={value}")
    )
    return word.replace("\0", "")


_PLAUSIBLE = (
    *(
        "micro_batch=2",
        "micro_batch=0",
        "seq_len=4096",
        "seq_len=1000000",
        "zero=3",
        "zero=1",
        "grad_accum=8",
    ),
    *(
        "gradient_checkpointing=off",
        "offload_optimizer=cpu",
        "offload_param=nvme",
        "nvme_path=/tmp",
        "lora_rank=8",
    ),
    *("learning_rate=1e-3", "precision=fp16", "attention=eager", "optimizer=adamw_8bit", "quantization=nf4"),
    *(
        "liger=on",
        "deepspeed.zero_optimization.reduce_bucket_size=2e8",
        "gpus=8",
        "steps=5",
        "gpu=t4",
        "gpu=cpu",
    ),
    *(
        "deepspeed.fp16.loss_scale=0",
        "deepspeed.gradient_clipping=1",
        "checkpointing_every=2",
        "micro_batch=1..8",
    ),
)


def _make_words(maker: Maker, folder: Path) -> None:
    words = [_word(maker) for _ in range(maker.draw.randrange(1, 4))]
    (folder / "words").write_bytes("\0".join(words).encode("utf-8", "surrogatepass"))


def _words_of(folder: Path) -> list[str]:
    return (folder / "words").read_bytes().decode("utf-8", "surrogateescape").split("\0")


def _act_set(folder: Path) -> None:
    values: dict[str, Any] = {"model": MODEL}
    for word in _words_of(folder):
        values = option_values.merge(values, parse_set(word))
    settled(values)


def _act_change(folder: Path) -> None:
    spec, prediction = _running()
    plan_change(spec, prediction, _words_of(folder))


def _act_axes(folder: Path) -> None:
    parse_axes(",".join(_words_of(folder)))


@cache
def _running() -> tuple[RunSpec, Prediction]:
    spec = resolve(
        [Layer(ValueSource.COMMAND_LINE, "", {"model": MODEL, "steps": 100})], name="case", machine=HERE
    )
    return spec, predict(spec)


# --- figures of the machine ---------------------------------------------------------------------------------


def _calibration_path() -> tuple[RunSpec, Path]:
    spec, _ = _running()
    path = calibration.path_for(spec)
    path.parent.mkdir(parents=True, exist_ok=True)
    return spec, path


def _make_calibration(maker: Maker, folder: Path) -> None:
    spec, path = _calibration_path()
    value = maker.of(calibration.Calibration)
    named = [
        (key, spec.gpu.name if key == "gpu" else 1 if key == "schema_version" else item)
        for key, item in value
    ]
    path.write_bytes(maker.json_of(maker.spoilt(dict(named)) if maker.chance(0.4) else dict(named)))


def _act_calibration(folder: Path) -> None:
    spec, _ = _calibration_path()
    found = calibration.find(spec)
    if found is not None:
        list(calibration.doubts(found))
    looked_at(calibration.calibrated(spec, found), closely=True)


def _trace_path() -> Path:
    return tracing._path({"model_type": "no-such-model"}, {})


def _make_trace(maker: Maker, folder: Path) -> None:
    from llmtop.presets.spec import ModelShape

    spec, _ = _running()
    path = _trace_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    value = tree_of(spec.model) if maker.chance(0.5) else dict(maker.of(ModelShape))
    path.write_bytes(maker.json_of(maker.spoilt(value) if maker.chance(0.6) else value))


def _act_trace(folder: Path) -> None:
    shape = tracing._kept(_trace_path())
    if shape is not None:
        msgspec.json.encode(shape)


# --- hosts, and files of weights that are no configuration -----------------------------------------------


def _make_hostfile(maker: Maker, folder: Path) -> None:
    draw = maker.draw
    lines = [f"worker-{number} slots=4" for number in range(draw.randrange(1, 6))]
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        host = draw.choice(("worker-0", "10.0.0.1", "user@host", draw.choice(TEXTS)))
        slots = draw.choice(("8", "4", "2", "0", "x", "", draw.choice(NUMBERS)))
        line = draw.choice((f"{host} slots={slots}", f"{host} slots={slots} # c", f"# {host}", host, ""))
        lines.insert(draw.randrange(len(lines) + 1), line)
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    (folder / "hostfile").write_bytes(maker.bytes_of(content) if maker.chance(0.2) else content)
    odd = (
        "worker-0",
        "worker-0:0,1",
        "worker-1@worker-0:2",
        "worker-0:",
        ":",
        "@",
        "x:y",
        draw.choice(TEXTS),
    )
    chosen = [draw.choice(odd) if maker.chance(0.3) else "" for _ in range(2)]
    filters = "\n".join(word.replace("\n", "") for word in chosen)
    (folder / "filters").write_bytes(filters.encode("utf-8", "surrogatepass"))


def _act_hostfile(folder: Path) -> None:
    include, exclude = (folder / "filters").read_bytes().decode("utf-8", "replace").split("\n")
    pool = hostfile.read_hostfile(folder / "hostfile")
    chosen = hostfile.choose(pool, include=include, exclude=exclude)
    hostfile.with_ranks(hostfile.take(chosen, nodes=1, gpus=2))
    hostfile.with_ranks(chosen)


def _make_gguf(maker: Maker, folder: Path) -> None:
    """The head of a GGUF file: magic, version, counts, then keys with values of a kind."""
    draw = maker.draw
    far = (0, 1, 2, 3, 1 << 31, (1 << 63) - 1, (1 << 64) - 1)
    content = draw.choice((b"GGUF", b"GGUF", b"FUGG", b"GGML"))
    content += struct.pack("<IQQ", draw.choice((1, 2, 3, 4, 1 << 31)), draw.choice(far), draw.choice(far))
    for _ in range(draw.randrange(4)):
        key = maker.key().encode("utf-8", "replace")
        content += struct.pack("<Q", draw.choice((len(key), *far))) + key
        content += struct.pack("<I", draw.randrange(14)) + draw.randbytes(draw.randrange(20))
    (folder / "model.gguf").write_bytes(maker.bytes_of(content) if maker.chance(0.2) else content)


def _act_gguf(folder: Path) -> None:
    """Nothing of llmtop reads one that it has not written itself; given as a model it is told as none."""
    for word in (folder / "model.gguf", folder):
        try:
            catalog.load_model(str(word))
        except LlmtopError as error:
            assert str(word) in error.what
        else:
            raise AssertionError("a GGUF file was taken for a configuration")


TARGETS = (
    Target(name="recipe TOML", make=_make_recipe, act=_act_recipe),
    Target(name="model preset TOML", make=_make_preset("models"), act=_act_model, prepare=_no_tracing),
    Target(name="GPU preset TOML", make=_make_preset("gpus"), act=_act_gpu),
    Target(name="Hugging Face config.json", make=_make_hf, act=_act_hf, prepare=_no_tracing, share=1.5),
    Target(name="DeepSpeed JSON", make=_make_ds, act=_act_ds, share=1.5),
    Target(name="--set KEY=VALUE", make=_make_words, act=_act_set),
    Target(name="changes of a live run", make=_make_words, act=_act_change, share=0.5),
    Target(name="--sweep VALUES", make=_make_words, act=_act_axes),
    Target(name="calibration file", make=_make_calibration, act=_act_calibration, share=0.3),
    Target(name="hostfile and its filters", make=_make_hostfile, act=_act_hostfile),
    Target(name="GGUF header given as a model", make=_make_gguf, act=_act_gguf),
    Target(name="cache of traces", make=_make_trace, act=_act_trace),
)

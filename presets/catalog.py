"""Reads presets: models, GPUs and recipes, the user's own before the built-in ones.

Only the file that is asked for is read. A user's preset lies in
`$XDG_CONFIG_HOME/llmtop/presets/{models,gpus,recipes}/NAME.toml` and wins over a built-in one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets import option_values
from llmtop.presets.errors import PackedWeightsError, UsageError, bad_value
from llmtop.presets.hf import canonical as hf_canonical
from llmtop.presets.hf import config as hf_config
from llmtop.presets.notfound import model_on_the_hub, no_model_path, no_recipe_file, unknown_preset
from llmtop.presets.paths import expand_user, is_folder, is_hub_id
from llmtop.presets.presetfiles import BUILT_IN, Kind, find, is_name, preset_names, user_presets_dir
from llmtop.presets.spec import GpuSpec, ModelShape
from llmtop.presets.toml_file import TomlFile

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json", "pytorch_model*.index.json")
"""An index whose files are not there is a folder of weights that is not whole."""
_MODEL_KEYS = ("description", "source", "license", "config")
_GPU_KEYS = (*GpuSpec.__struct_fields__, "description", "alias_of")
_RATES = tuple(name for name in GpuSpec.__struct_fields__ if name.endswith("_bytes_per_second"))
_MIN_RATE, _MAX_RATE = 1e6, 1e21
"""Per second: outside of these a figure is a slip of the hand."""
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
_RECIPE_TEXTS = ("description", "goal", "notes", "base")


class LoadedModel(Struct, frozen=True, kw_only=True):
    """A model, as far as it is known before anything is built."""

    shape: ModelShape
    hf_config: dict[str, Any]
    """What `transformers.AutoConfig.for_model` takes."""
    source: str
    """The file that the shape was read from."""
    weights_dir: str | None = None
    """Folder with weights to start from."""


class Recipe(Struct, frozen=True, kw_only=True):
    """A named set of option values."""

    name: str
    description: str
    values: dict[str, Any]
    """Option name to value, as the file has it."""
    sources: dict[str, str]
    """Option name to the file that its value came from."""
    goal: str = ""
    notes: str = ""


class PresetEntry(Struct, frozen=True, kw_only=True):
    """One line of the catalogue."""

    name: str
    kind: Kind
    path: str
    description: str
    error: str = ""
    """What is wrong with the file, which then cannot be used; empty for a good one."""


def entries(kind: Kind) -> tuple[PresetEntry, ...]:
    """Every preset of one kind, by name; a user's own hides the built-in one of the same name.

    A broken file is an entry with its error, so that it hides none of the others.
    """
    found: list[PresetEntry] = []
    for name in preset_names(kind):
        path = find(kind, name)
        found.append(_entry(kind, name, path) if path is not None else _ill_named(kind, name))
    return tuple(found)


def _ill_named(kind: Kind, name: str) -> PresetEntry:
    error = "a preset's file name is made of letters, digits, '.', '_' and '-'"
    path = str(user_presets_dir() / kind / f"{name}.toml")
    return PresetEntry(name=name, kind=kind, path=path, description=f"broken: {error}", error=error)


def _entry(kind: Kind, name: str, path: Path) -> PresetEntry:
    description = error = ""
    try:
        file = TomlFile(path)
        alias = file.text("alias_of", "") if kind == "gpus" else ""
        description = f"the same as {alias}" if alias else file.text("description", "")
        if not path.is_relative_to(BUILT_IN):
            # The built-in ones are known to be good, and reading them whole would take longer.
            _READERS[kind](path)
    except UsageError as problem:
        error = "; ".join(filter(None, (problem.what, problem.why)))
        description = f"broken: {error.replace(f'{path.parent}{os.sep}', '')}"
    return PresetEntry(name=name, kind=kind, path=str(path), description=description, error=error)


def load_model(ref: str) -> LoadedModel:
    """A model preset by name, a Hugging Face config.json, or a folder that holds one."""
    looks_like_path = "/" in ref or os.sep in ref or ref.endswith(".json") or ref.startswith(("~", "."))
    if not looks_like_path:
        preset = find("models", ref)
        if preset is not None:
            return _model_preset(preset)
    # os.path answers for names that no file can have, where pathlib raises.
    expanded = expand_user(ref)
    if os.path.isdir(expanded):  # noqa: PTH112
        return _model_folder(Path(expanded))
    if os.path.exists(expanded):  # noqa: PTH110
        return _model_file(Path(expanded))
    if is_hub_id(ref):
        raise model_on_the_hub(ref)
    if looks_like_path:
        raise no_model_path(ref)
    raise unknown_preset("models", ref, why="and no file or folder of that name is here")


def _model_preset(path: Path) -> LoadedModel:
    file = TomlFile(path)
    file.require_known(_MODEL_KEYS)
    file.text("description", "")
    # TOML has no null, which some configurations need to turn a class's default off.
    config = {key: None if value == "null" else value for key, value in file.table("config").items()}
    return _loaded(config, name=path.stem, source=path, weights_dir=None)


def _model_file(path: Path) -> LoadedModel:
    config = hf_config.read_file(path)
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return _loaded(config, name=name, source=path, weights_dir=None)


def _model_folder(folder: Path) -> LoadedModel:
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(
            f"{folder}: holds no config.json", fix="give the folder that a model was saved to, or a preset"
        )
    config = hf_config.read_file(path)
    loaded = _loaded(config, name=folder.resolve().name, source=path, weights_dir=None)
    has_weights = holds_weights(folder)
    if has_weights and not hf_canonical.is_plain(config, traced=loaded.shape.traced is not None):
        raise UsageError(
            f"{folder}: its weights are not those of a plain language model",
            why="the layout of the saved tensors is not the one that training builds",
            fix=f"give {path} itself: the same shape, from random weights",
        )
    packed = config.get("quantization_config")
    if has_weights and packed:
        method = packed.get("quant_method") if isinstance(packed, dict) else None
        raise PackedWeightsError(folder, path, str(method or ""))
    return replace(loaded, weights_dir=str(folder.resolve())) if has_weights else loaded


def holds_weights(folder: Path) -> bool:
    return is_folder(folder) and any(next(folder.glob(pattern), None) for pattern in _WEIGHTS)


def _loaded(config: dict[str, Any], *, name: str, source: Path, weights_dir: str | None) -> LoadedModel:
    try:
        plain = hf_canonical.canonical(config, str(source))
        shape = hf_config.read_shape(plain, name, str(source))
    except hf_canonical.UnknownArchitectureError as unknown:
        if "model_type" not in config:
            raise
        plain = hf_canonical.plain_keys(config, str(source))
        from llmtop.presets.hf import tracing  # which starts processes: seldom needed, and slow to load

        shape = tracing.traced_shape(plain, name, unknown)
    return LoadedModel(shape=shape, hf_config=plain, source=str(source), weights_dir=weights_dir)


def load_gpu(name: str) -> GpuSpec:
    """A GPU preset by name."""
    path = find("gpus", name)
    if path is None:
        raise unknown_preset("gpus", name)
    return _gpu(path)


def _gpu(path: Path) -> GpuSpec:
    file = TomlFile(path)
    alias = file.text("alias_of", "")
    if alias:
        target = find("gpus", alias)
        if target is None or target == path:
            raise UsageError(f"{file.where('alias_of')}: no GPU preset is called '{alias}'")
        path, file = target, TomlFile(target)
    file.require_known(_GPU_KEYS)
    file.text("description", "")
    values = {key: value for key, value in file.values.items() if key in GpuSpec.__struct_fields__}
    file.require_known(_PRECISIONS, file.table("dense_flops_per_second"))
    file.require_known(GpuSpec.__struct_fields__, file.table("sources"))
    option_values.check_raw(values, str(path), "the preset")
    _check_figures(file, values)
    return file.convert({"name": path.stem, **values}, GpuSpec)


def _check_figures(file: TomlFile, values: dict[str, Any]) -> None:
    """The step time divides by the rates, and the capability is read as a number."""
    figures = {key: values[key] for key in _RATES if key in values}
    for key, value in (figures | file.table("dense_flops_per_second")).items():
        # A figure of another type is told by the conversion to the struct.
        if isinstance(value, (int, float)) and not _MIN_RATE <= value <= _MAX_RATE:
            raise bad_value(file.where(key), key, value, f"a number from {_MIN_RATE:g} to {_MAX_RATE:g}")
    capability = values.get("compute_capability")
    if isinstance(capability, str) and not _is_capability(capability):
        where = file.where("compute_capability")
        raise bad_value(where, "compute_capability", capability, 'two numbers as in "9.0"')


def _is_capability(text: str) -> bool:
    """Two numbers of at most three and two digits, as in 12.0."""
    major, point, minor = text.partition(".")
    digits = text.isascii() and major.isdigit() and minor.isdigit()
    return digits and bool(point) and len(major) <= 3 and len(minor) <= 2


def load_recipe(name_or_path: str) -> Recipe:
    """A recipe by name, or from a TOML file by its path."""
    path = find("recipes", name_or_path)
    if (
        path is None
        and not name_or_path.endswith(".json")
        and (name_or_path.endswith(".toml") or "/" in name_or_path)
    ):
        expanded = expand_user(name_or_path)
        if not os.path.lexists(expanded):
            raise no_recipe_file(name_or_path)
        # A folder is told what it is below.
        path = Path(expanded) if not is_folder(Path(expanded)) else None
    if path is None:
        raise unknown_preset("recipes", name_or_path)
    return _own_recipe(path)


def _recipe(path: Path, seen: tuple[Path, ...]) -> Recipe:
    file = TomlFile(path)
    own: dict[str, Any] = {}
    for key, value in file.values.items():
        if key not in _RECIPE_TEXTS:
            own[key] = option_values.check(key, value, file.where(key), extra_keys=_RECIPE_TEXTS)
    values, sources = dict(own), dict.fromkeys(own, str(path))
    base_name = file.text("base", "")
    if base_name:
        base = _recipe(_base_path(file, base_name, (*seen, path)), (*seen, path))
        values = option_values.merge(base.values, own)
        sources = base.sources | sources
    return Recipe(
        name=path.stem,
        description=file.text("description", ""),
        values=values,
        sources=sources,
        goal=file.text("goal", ""),
        notes=file.text("notes", ""),
    )


def _own_recipe(path: Path) -> Recipe:
    return _recipe(path, seen=())


def _base_path(file: TomlFile, base: str, seen: tuple[Path, ...]) -> Path:
    """A recipe may refine the built-in one of its own name, but never lead back to itself."""
    built_in = BUILT_IN / "recipes" / f"{base}.toml" if is_name(base) else None
    for path in (find("recipes", base), built_in):
        if path is not None and path.is_file() and path not in seen:
            return path
    if find("recipes", base) is None:
        raise UsageError(
            f"{file.where('base')}: no recipe is called '{base}'", fix=unknown_preset("recipes", base).fix
        )
    raise UsageError(f"{file.where('base')}: base = '{base}' leads back to this recipe")


_READERS: dict[Kind, Callable[[Path], object]] = {
    "models": _model_preset,
    "gpus": _gpu,
    "recipes": _own_recipe,
}

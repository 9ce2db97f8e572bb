"""Finds and reads presets: models, GPUs and recipes, the user's own before the built-in ones.

Only the file that is asked for is read. A user's preset lies in
`$XDG_CONFIG_HOME/llmtop/presets/{models,gpus,recipes}/NAME.toml` and wins over a built-in one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets import option_values
from llmtop.presets.errors import PackedWeightsError, UsageError, bad_value, begun, nearest
from llmtop.presets.hf import canonical as hf_canonical
from llmtop.presets.hf import config as hf_config
from llmtop.presets.paths import expand_user, is_folder, is_hub_id, nearest_sibling
from llmtop.presets.spec import GpuSpec, ModelShape
from llmtop.presets.toml_file import TomlFile

Kind = Literal["models", "gpus", "recipes"]

BUILT_IN = Path(__file__).resolve().parent
"""The folder of the presets that come with the program."""
_LONGEST_NAME = 100
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json", "pytorch_model*.index.json")
"""An index whose files are not there is a folder of weights that is not whole."""
_MODEL_KEYS = ("description", "source", "license", "config")
_GPU_KEYS = (*GpuSpec.__struct_fields__, "description", "alias_of")
_RATES = tuple(name for name in GpuSpec.__struct_fields__ if name.endswith("_bytes_per_second"))
_MIN_RATE, _MAX_RATE = 1e6, 1e21
"""Per second: outside of these a figure is a slip of the hand."""
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
_MODEL_MARKS = {"model_type", "architectures", "text_config"}
_DEEPSPEED_MARKS = {
    *("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "fp16", "bf16", "optimizer"),
    *("gradient_accumulation_steps", "gradient_clipping", "scheduler", "activation_checkpointing"),
}
"""Top keys by which a JSON file is told to be one or the other."""
_SCRIPT_COMMANDS = {".py": "python", ".sh": "bash"}
_JSON_FIX = "of a model: --model {name}; of DeepSpeed: --deepspeed-config {name}"
_MOST_NAMED = 6
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


def user_presets_dir() -> Path:
    """Where a person's own presets lie, whether it exists or not."""
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG rules say to ignore a relative path.
    root = Path(configured) if Path(configured).is_absolute() else Path.home() / ".config"
    return root / "llmtop" / "presets"


def _folders(kind: Kind) -> tuple[Path, Path]:
    return user_presets_dir() / kind, BUILT_IN / kind


def _names(kind: Kind) -> list[str]:
    return sorted({path.stem for folder in _folders(kind) for path in folder.glob("*.toml")})


def _is_name(text: str) -> bool:
    """Letters, digits and, behind the first, `.`, `_` and `-`; a pattern would take longer to compile."""
    is_short = 0 < len(text) <= _LONGEST_NAME and text.isascii() and text[0].isalnum()
    return is_short and all(letter.isalnum() or letter in "._-" for letter in text)


def _find(kind: Kind, name: str) -> Path | None:
    if not _is_name(name):
        return None
    for folder in _folders(kind):
        for spelling in dict.fromkeys((name, name.lower())):
            path = folder / f"{spelling}.toml"
            if path.is_file():
                return path
    return None


def has(kind: Kind, name: str) -> bool:
    """Whether there is a preset of this name."""
    return _find(kind, name) is not None


def _unknown(kind: Kind, name: str, why: str = "") -> UsageError:
    word = {"models": "model", "gpus": "GPU", "recipes": "recipe"}[kind]
    names = [known for known in _names(kind) if _is_name(known)]
    lists = f"`llmtop presets {kind}` lists the {word}s"
    other = _of_another_kind(kind, name)
    other = other or (_of_a_file(name) if kind == "recipes" else None)
    if other:
        why, fix = f"that is {other[0]}", other[1]
    else:
        several, guess = begun(name, names), nearest(name, names)
        if kind == "recipes" and not several and guess is None:
            # A model's name may stand there too.
            models = _names("models")
            word, several, guess = "recipe or model", begun(name, models), nearest(name, models)
            model_lists = "`llmtop presets models` lists the models"
            lists = model_lists if several or guess else f"{lists}, {model_lists.replace(' lists', '')}"
        if len(several) > 1:
            fix = f"say which: {_listed(several)}; {lists}"
        else:
            fix = f"did you mean '{guess or several[0]}'? {lists}" if guess or several else lists
    return UsageError(f"no {word} preset is called '{name[:80]}'", why=why, fix=fix)


def _listed(names: tuple[str, ...]) -> str:
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    *first, last = (*names[:_MOST_NAMED], *more)
    return f"{', '.join(first)} or {last}"


def _of_another_kind(kind: Kind, name: str) -> tuple[str, str] | None:
    """What a preset of this name is instead, and how it is given."""
    if kind != "models" and _find("models", name):
        return "a model", f"--model {name}"
    if kind != "gpus" and _find("gpus", name):
        return "a GPU", f"--gpu {name}"
    if kind != "recipes" and _find("recipes", name):
        return "a recipe", f"llmtop plan {name}"
    return None


def _of_a_file(name: str) -> tuple[str, str] | None:
    """What a file or folder in the place of a recipe is, and how it is given."""
    path = Path(expand_user(name))
    if os.path.isdir(path):  # noqa: PTH112
        return "a folder", f"--model {name}" if (
            path / "config.json"
        ).is_file() else "a recipe is a TOML file"
    if command := _SCRIPT_COMMANDS.get(path.suffix.lower()):
        return "a script", f"llmtop run -- {command} {name}"
    if not os.path.isfile(path):  # noqa: PTH113
        return ("a file that is not here", _JSON_FIX.format(name=name)) if path.suffix == ".json" else None
    if path.suffix.lower() != ".json":
        return (
            "a file of another kind",
            "a recipe is a TOML file (llmtop presets recipes lists the built-in ones)",
        )
    config = hf_config.read_file(path)
    if config.keys() & _MODEL_MARKS:
        return "a model", f"--model {name}"
    if config.keys() & _DEEPSPEED_MARKS:
        return "a DeepSpeed configuration", f"--deepspeed-config {name}, with --model"
    return "a JSON file of neither a model nor DeepSpeed", "a recipe is a TOML file"


def entries(kind: Kind) -> tuple[PresetEntry, ...]:
    """Every preset of one kind, by name; a user's own hides the built-in one of the same name.

    A broken file is an entry with its error, so that it hides none of the others.
    """
    found: list[PresetEntry] = []
    for name in _names(kind):
        path = _find(kind, name)
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
        preset = _find("models", ref)
        if preset is not None:
            return _model_preset(preset)
    # os.path answers for names that no file can have, where pathlib raises.
    expanded = expand_user(ref)
    if os.path.isdir(expanded):  # noqa: PTH112
        return _model_folder(Path(expanded))
    if os.path.exists(expanded):  # noqa: PTH110
        return _model_file(Path(expanded))
    if is_hub_id(ref):
        raise _on_the_hub(ref)
    if looks_like_path:
        raise UsageError(
            f"{ref[:200]}: no such file or folder",
            why="a model with a slash or a .json ending is looked up as a path",
            fix=f"did you mean {guess}?"
            if (guess := nearest_sibling(Path(expanded)))
            else "give a config.json, a folder that holds one, or the name of a model preset",
        )
    raise _unknown("models", ref, why="and no file or folder of that name is here")


def _on_the_hub(ref: str) -> UsageError:
    name = ref.rpartition("/")[2]
    preset = nearest(name, _names("models"))
    shape = f"; --model {preset} is a preset of its shape, without weights" if preset else ""
    return UsageError(
        f"{ref[:200]}: no such file or folder",
        why="it reads like a model on the Hugging Face Hub, and nothing is downloaded from there",
        fix=f"hf download {ref} --local-dir {name}, then --model {name}{shape}",
    )


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
    path = _find("gpus", name)
    if path is None:
        raise _unknown("gpus", name)
    return _gpu(path)


def _gpu(path: Path) -> GpuSpec:
    file = TomlFile(path)
    alias = file.text("alias_of", "")
    if alias:
        target = _find("gpus", alias)
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


def _no_recipe_file(ref: str, path: Path) -> UsageError:
    guess = nearest_sibling(path)
    if is_hub_id(ref) and not is_folder(path.parent):
        return _on_the_hub(ref)
    lists = "`llmtop presets recipes` lists the recipes"
    what = "no such recipe file"
    if path.suffix != ".toml":
        what, lists = "no such recipe file or model folder", f"{lists}, `llmtop presets models` the models"
    return UsageError(f"{ref[:200]}: {what}", fix=f"did you mean {guess}?" if guess else lists)


def load_recipe(name_or_path: str) -> Recipe:
    """A recipe by name, or from a TOML file by its path."""
    path = _find("recipes", name_or_path)
    if (
        path is None
        and not name_or_path.endswith(".json")
        and (name_or_path.endswith(".toml") or "/" in name_or_path)
    ):
        expanded = expand_user(name_or_path)
        if not os.path.lexists(expanded):
            raise _no_recipe_file(name_or_path, Path(expanded))
        # A folder is told what it is below.
        path = Path(expanded) if not is_folder(Path(expanded)) else None
    if path is None:
        raise _unknown("recipes", name_or_path)
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
    built_in = BUILT_IN / "recipes" / f"{base}.toml" if _is_name(base) else None
    for path in (_find("recipes", base), built_in):
        if path is not None and path.is_file() and path not in seen:
            return path
    if _find("recipes", base) is None:
        raise UsageError(
            f"{file.where('base')}: no recipe is called '{base}'", fix=_unknown("recipes", base).fix
        )
    raise UsageError(f"{file.where('base')}: base = '{base}' leads back to this recipe")


_READERS: dict[Kind, Callable[[Path], object]] = {
    "models": _model_preset,
    "gpus": _gpu,
    "recipes": _own_recipe,
}

"""What is said of a name or path that no preset has: what it is instead, or which one was meant."""

from __future__ import annotations

import os
from pathlib import Path

from llmtop.presets.errors import UsageError, begun, nearest
from llmtop.presets.hf import config as hf_config
from llmtop.presets.paths import expand_user, is_folder, is_hub_id, nearest_sibling
from llmtop.presets.presetfiles import Kind, find, is_name, preset_names

_WORDS: dict[Kind, str] = {"models": "model", "gpus": "GPU", "recipes": "recipe"}
_GIVEN: dict[Kind, str] = {"models": "--model", "gpus": "--gpu", "recipes": "llmtop plan"}
_MODEL_MARKS = {"model_type", "architectures", "text_config"}
_DEEPSPEED_MARKS = {
    *("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "fp16", "bf16", "optimizer"),
    *("gradient_accumulation_steps", "gradient_clipping", "scheduler", "activation_checkpointing"),
}
"""Top keys by which a JSON file is told to be one or the other."""
_SCRIPT_COMMANDS = {".py": "python", ".sh": "bash"}
_JSON_FIX = "of a model: --model {name}; of DeepSpeed: --deepspeed-config {name}"
_RECIPES_ARE_TOML = "a recipe is a TOML file"
_MOST_NAMED = 6


def unknown_preset(kind: Kind, name: str, why: str = "") -> UsageError:
    """`why`: what else is known of it, where it is nothing of another kind."""
    other = _of_another_kind(kind, name) or (_of_a_file(name) if kind == "recipes" else None)
    if other is not None:
        what, fix = other
        return _no_preset(_WORDS[kind], name, f"that is {what}", fix)
    meant = _meant(kind, name)
    if kind != "recipes" or meant:
        return _no_preset(_WORDS[kind], name, why, meant or _lists(kind))
    # A model's name may stand there too.
    fix = _meant("models", name) or _lists("recipes", "models")
    return _no_preset("recipe or model", name, why, fix)


def _no_preset(word: str, name: str, why: str, fix: str) -> UsageError:
    return UsageError(f"no {word} preset is called '{name[:80]}'", why=why, fix=fix)


def _meant(kind: Kind, name: str) -> str:
    """Which preset it may stand for; empty for none."""
    names = [known for known in preset_names(kind) if is_name(known)]
    several, guess = begun(name, names), nearest(name, names)
    if len(several) > 1:
        return f"say which: {_listed(several)}; {_lists(kind)}"
    return f"did you mean '{guess or several[0]}'? {_lists(kind)}" if guess or several else ""


def _listed(names: tuple[str, ...]) -> str:
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    *first, last = (*names[:_MOST_NAMED], *more)
    return f"{', '.join(first)} or {last}"


def _lists(first: Kind, *others: Kind) -> str:
    """The commands that list what there is."""
    more = "".join(f", `llmtop presets {kind}` the {_WORDS[kind]}s" for kind in others)
    return f"`llmtop presets {first}` lists the {_WORDS[first]}s{more}"


def _of_another_kind(kind: Kind, name: str) -> tuple[str, str] | None:
    """What a preset of this name is instead, and how it is given."""
    for other, given in _GIVEN.items():
        if other != kind and find(other, name) is not None:
            return f"a {_WORDS[other]}", f"{given} {name}"
    return None


def _of_a_file(name: str) -> tuple[str, str] | None:
    """What a file or folder in the place of a recipe is, and how it is given."""
    path = Path(expand_user(name))
    # os.path answers for names that no file can have, where pathlib raises.
    if os.path.isdir(path):  # noqa: PTH112
        return "a folder", f"--model {name}" if (path / "config.json").is_file() else _RECIPES_ARE_TOML
    if command := _SCRIPT_COMMANDS.get(path.suffix.lower()):
        return "a script", f"llmtop run -- {command} {name}"
    if not os.path.isfile(path):  # noqa: PTH113
        return ("a file that is not here", _JSON_FIX.format(name=name)) if path.suffix == ".json" else None
    if path.suffix.lower() != ".json":
        lists = "(llmtop presets recipes lists the built-in ones)"
        return "a file of another kind", f"{_RECIPES_ARE_TOML} {lists}"
    config = hf_config.read_file(path)
    if config.keys() & _MODEL_MARKS:
        return "a model", f"--model {name}"
    if config.keys() & _DEEPSPEED_MARKS:
        return "a DeepSpeed configuration", f"--deepspeed-config {name}, with --model"
    return "a JSON file of neither a model nor DeepSpeed", _RECIPES_ARE_TOML


def model_on_the_hub(ref: str) -> UsageError:
    name = ref.rpartition("/")[2]
    preset = nearest(name, preset_names("models"))
    shape = f"; --model {preset} is a preset of its shape, without weights" if preset else ""
    return UsageError(
        f"{ref[:200]}: no such file or folder",
        why="it reads like a model on the Hugging Face Hub, and nothing is downloaded from there",
        fix=f"hf download {ref} --local-dir {name}, then --model {name}{shape}",
    )


def no_model_path(ref: str) -> UsageError:
    """For what is written as a path, and nothing is there."""
    guess = nearest_sibling(Path(expand_user(ref)))
    otherwise = "give a config.json, a folder that holds one, or the name of a model preset"
    return UsageError(
        f"{ref[:200]}: no such file or folder",
        why="a model with a slash or a .json ending is looked up as a path",
        fix=f"did you mean {guess}?" if guess else otherwise,
    )


def no_recipe_file(ref: str) -> UsageError:
    """The same for a recipe, in whose place a model's folder may stand."""
    path = Path(expand_user(ref))
    if is_hub_id(ref) and not is_folder(path.parent):
        return model_on_the_hub(ref)
    guess = nearest_sibling(path)
    if path.suffix == ".toml":
        what, lists = "no such recipe file", _lists("recipes")
    else:
        what, lists = "no such recipe file or model folder", _lists("recipes", "models")
    return UsageError(f"{ref[:200]}: {what}", fix=f"did you mean {guess}?" if guess else lists)

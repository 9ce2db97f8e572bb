"""`llmtop presets`: what there is to choose from, and which file each value comes from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from llmtop.presets import catalog, presetfiles
from llmtop.presets.errors import ExitCode, UsageError, nearest
from llmtop.tui.commands.output import named_lines, print_json, short_path, text_width, wrapped

Kind = Literal["models", "gpus", "recipes"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class PresetLine(msgspec.Struct, frozen=True, kw_only=True):
    """One preset in the answer of `presets --json`."""

    kind: str
    name: str
    description: str
    file: str
    error: str = ""
    """Why the file cannot be used; empty for a good one."""


class PresetList(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int = 1
    presets: tuple[PresetLine, ...]


class PresetDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `presets KIND NAME --json`."""

    schema_version: int = 1
    kind: str
    name: str
    values: dict[str, Any]
    sources: dict[str, str]
    """Key to the file (or, for GPUs, the document) that its value was read in."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", metavar="KIND", help="models, gpus or recipes; default: all three")
    parser.add_argument("name", nargs="?", metavar="NAME", help="one preset: its values and their sources")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    kinds = KINDS if args.kind is None else (_kind(args.kind),)
    if args.name is not None:
        _show_one(kinds[0], args.name, as_json=args.json)
        return ExitCode.DONE
    lines = tuple(
        PresetLine(
            kind=kind, name=entry.name, description=entry.description, file=entry.path, error=entry.error
        )
        for kind in kinds
        for entry in catalog.entries(kind)
    )
    if args.json:
        print_json(PresetList(presets=lines))
    else:
        _print_list(kinds, lines)
    return ExitCode.DONE


def _kind(word: str) -> Kind:
    if word in KINDS:
        return word
    of_kind = next((kind for kind in KINDS if presetfiles.has(kind, word)), None)
    if of_kind is not None:
        raise UsageError(
            f"presets: there is no kind of preset called '{word}'",
            why=f"it is the name of one of the {of_kind}",
            fix=f"llmtop presets {of_kind} {word}",
        )
    guess = nearest(word, KINDS)
    raise UsageError(
        f"presets: there is no kind of preset called '{word}'",
        fix=f"did you mean '{guess}'?" if guess else f"use one of {', '.join(KINDS)}",
    )


def _print_list(kinds: tuple[Kind, ...], lines: tuple[PresetLine, ...]) -> None:
    width = text_width()
    for kind in kinds:
        print(f"{kind}:")
        rows = [(line.name, _told(line)) for line in lines if line.kind == kind]
        for text in named_lines(rows, width):
            print(text)
    for where, folder in (("built in", presetfiles.BUILT_IN), ("yours", presetfiles.user_presets_dir())):
        for text in wrapped(f"{folder}/{'|'.join(kinds)}", f"{where}: ", width):
            print(text)


def _told(line: PresetLine) -> str:
    """The description, marked where the preset is the user's own."""
    own = not Path(line.file).is_relative_to(presetfiles.BUILT_IN)
    return " ".join(filter(None, (line.description, f"({short_path(line.file)})" if own else "")))


def _show_one(kind: Kind, name: str, *, as_json: bool) -> None:
    detail = _detail(kind, name)
    if as_json:
        print_json(detail)
        return
    places = set(detail.sources.values())
    width = text_width()
    common = f", all from {short_path(min(places))}" if len(places) == 1 else ""
    for text in wrapped(f"{kind}/{detail.name}{common}", "", width):
        print(text)
    rows = []
    for key, value in detail.values.items():
        source = "" if common else short_path(detail.sources.get(key, ""))
        rows.append((key, _json_line(value) + (f"  ({source})" if source else "")))
    for text in named_lines(rows, width):
        print(text)


def _json_line(value: object) -> str:
    """One line with spaces, so that it can be wrapped."""
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def _detail(kind: Kind, name: str) -> PresetDetail:
    if kind == "recipes":
        recipe = catalog.load_recipe(name)
        return PresetDetail(kind=kind, name=recipe.name, values=recipe.values, sources=recipe.sources)
    if kind == "gpus":
        gpu = catalog.load_gpu(name)
        values = msgspec.to_builtins(gpu)
        sources = values.pop("sources")
        return PresetDetail(kind=kind, name=gpu.name, values=values, sources=sources)
    model = catalog.load_model(name)
    values = msgspec.to_builtins(model.shape)
    return PresetDetail(
        kind=kind, name=model.shape.name, values=values, sources=dict.fromkeys(values, model.source)
    )

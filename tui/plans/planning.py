"""A plan being edited: a recipe, the edits over it, and what they come to. No widget, no state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets import catalog, liger, option_values, presetfiles, resolve, rules
from llmtop.presets.cautions import cautions
from llmtop.presets.errors import LlmtopError
from llmtop.presets.hf import tracing
from llmtop.presets.rule import Refusal
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.cost.calibration import with_calibration
from llmtop.profiler.memory.predict import predict_with_suggestions
from llmtop.profiler.memory.result import Prediction
from llmtop.tui.commandline.layering import absolute, check_raw_keys, deepspeed_layer

RECIPE = "recipe"
"""Key of the row that chooses the recipe; no option has it."""
RAW = "deepspeed"
"""Key of the row of raw DeepSpeed keys, written as `path=value` separated by spaces."""
NO_RECIPE = "none"
_OF_A_CPU = (
    *("precision", "micro_batch", "seq_len", "learning_rate", "optimizer"),
    *("tokenizer", "data", "save_at_end"),
)
"""What a recipe for a CPU sets otherwise than a GPU wants."""
_GPU_RECIPE = "full-zero2"
EDITED = "the plan"
"""Provenance of a value that was changed in the plan."""

_MAY_BE_ZERO = (
    "lora_rank",
    "warmup_steps",
    "checkpoint_every",
    "keep_checkpoints",
    "classify_every",
    "seed",
    "threads_per_rank",
)
_CATALOGUES: dict[str, presetfiles.Kind] = {"model": "models", "gpu": "gpus", RECIPE: "recipes"}


class Draft(Struct, frozen=True, kw_only=True):
    """What a person has chosen so far."""

    recipe: str | None = None
    edits: dict[str, Any] = {}
    """Option name, or dotted raw key, to a typed value or to text as it was typed."""
    assumed: str | None = None
    """The recipe that the plan began with and nobody chose: another model or GPU than its own leaves it, as
    its other values were chosen for that one."""

    def edited(self, key: str, value: Any) -> Draft:
        if key == RECIPE:
            return replace(self, recipe=None if value == NO_RECIPE else value, assumed=None)
        return replace(self, edits={**self.edits, key: value})._settled()

    def reset(self, key: str) -> Draft:
        """Without the edit of one option; for the raw keys, without any of them."""
        kept = {name: value for name, value in self.edits.items() if name.split(".")[0] != key}
        return replace(self, edits=kept)._settled()

    def changed(self, changes: Mapping[str, Any]) -> Draft:
        """With the changes of a suggestion."""
        return replace(self, edits={**self.edits, **changes})._settled()

    def cleared(self) -> Draft:
        """Without any edit."""
        return replace(self, edits={})._settled()

    @property
    def has_left(self) -> bool:
        """Whether the recipe that nobody chose is left."""
        return self.assumed is not None and self.recipe is None

    def away(self) -> Draft:
        """Without the recipe that nobody chose: its model stays, as something has to be trained."""
        return replace(self, recipe=None) if self.assumed is not None else self

    @property
    def kept_model(self) -> str | None:
        """The model of a recipe that is left, unless another one is chosen."""
        if self.assumed is None or not self.has_left or "model" in self.edits:
            return None
        model: str = catalog.load_recipe(self.assumed).values["model"]
        return model

    def _settled(self) -> Draft:
        if self.assumed is None:
            return self
        try:
            values = catalog.load_recipe(self.assumed).values
        except LlmtopError:
            return self  # the plan tells what is wrong with it
        stays = all(self.edits.get(key, values.get(key)) == values.get(key) for key in ("model", "gpu"))
        return replace(self, recipe=self.assumed if stays else None)


class Wrong(Struct, frozen=True, kw_only=True):
    """Why one edit cannot be taken."""

    what: str
    why: str
    fix: str


class Plan(Struct, frozen=True, kw_only=True):
    """What a draft comes to: a prediction, or the error that stands in its way."""

    draft: Draft
    spec: RunSpec | None = None
    prediction: Prediction | None = None
    refusals: tuple[Refusal, ...] = ()
    """Why the run could not work though its memory can be predicted."""
    what: str = ""
    why: str = ""
    fix: str = ""
    wrong: tuple[str, ...] = ()
    """Edits that cannot be taken, whatever the others are."""
    also_wrong: tuple[Wrong, ...] = ()
    """What is wrong besides `what`."""
    cautions: tuple[str, ...] = ()
    """What is not wrong and still likely not meant."""
    waits: bool = False
    """What the model needs is not known yet: its code has to be traced first, which takes seconds."""

    @property
    def launchable(self) -> bool:
        return self.spec is not None and self.prediction is not None and not self.refusals


def evaluate_now(draft: Draft, machine: resolve.Machine) -> Plan:
    """The same without waiting for a model's code to be traced: then the plan `waits`."""
    with tracing.without_waiting():
        return evaluate(draft, machine)


def evaluate(draft: Draft, machine: resolve.Machine) -> Plan:
    """Resolve and predict; what is wrong comes back as words and never as an exception."""
    try:
        name = draft.recipe if draft.recipe is not None else "custom"
        spec = resolve.assemble(layers(draft, machine), name=Path(name).stem, machine=machine)
        refusals = tuple(rules.refusals(spec))
        if not refusals:
            check_raw_keys(spec)
        return Plan(
            draft=draft,
            spec=spec,
            prediction=predict_with_suggestions(with_calibration(spec)),
            refusals=refusals,
            cautions=(*_recipe_words(draft, spec), *cautions(spec)),
        )
    except tracing.NotTracedYetError as error:
        return Plan(draft=draft, what=error.what, why=error.why, fix=error.fix, waits=True)
    except LlmtopError as error:
        wrong = _wrong_edits(draft, machine)
        others = {found.what: found for found in wrong.values() if found.what != error.what}
        return Plan(
            draft=draft,
            what=error.what,
            why=error.why,
            fix=error.fix,
            wrong=tuple(wrong),
            also_wrong=tuple(others.values()),
        )


def left_words(recipe: str) -> str:
    """Of a recipe that nobody chose, and that another model or GPU has left."""
    return (
        f"the recipe {recipe} is left, which is for its own model on a CPU: its values are the defaults again"
    )


def _recipe_words(draft: Draft, spec: RunSpec) -> Iterator[str]:
    if draft.assumed is not None and draft.has_left:
        yield left_words(draft.assumed)
    if draft.recipe is None or spec.on_cpu:
        return
    values = catalog.load_recipe(draft.recipe).values
    if values.get("gpu") != "cpu":
        return
    stays = ", ".join(
        f"{key} {_text(values[key])}" for key in _OF_A_CPU if key in values and key not in draft.edits
    )
    if stays:
        yield (
            f"the recipe {draft.recipe} is made for a CPU, and {stays} stay from it;"
            f" recipe {NO_RECIPE} takes the defaults, {_GPU_RECIPE} is for GPUs"
        )


def _wrong_edits(draft: Draft, machine: resolve.Machine) -> dict[str, Wrong]:
    """The edits that cannot be taken even alone: a plan tells the first error, these are all of them."""
    bare = replace(draft, edits={})
    if _error(bare, machine) is not None:
        return {}
    alone = {key: _error(bare.edited(key, value), machine) for key, value in draft.edits.items()}
    return {key: found for key, found in alone.items() if found is not None}


def _error(draft: Draft, machine: resolve.Machine) -> Wrong | None:
    try:
        resolve.assemble(layers(draft, machine), name="custom", machine=machine)
    except LlmtopError as error:
        return Wrong(what=error.what, why=error.why, fix=error.fix)
    return None


def layers(draft: Draft, machine: resolve.Machine) -> list[resolve.Layer]:
    """The recipe, a DeepSpeed file that it or an edit names, and the edits."""
    found: list[resolve.Layer] = []
    if draft.recipe is not None:
        found = resolve.recipe_layers(catalog.load_recipe(draft.recipe))
    elif (model := draft.kept_model) is not None:
        found = [resolve.Layer(ValueSource.RECIPE, f"recipe {draft.assumed}", {"model": model})]
    edits = [resolve.Layer(ValueSource.COMMAND_LINE, EDITED, part) for part in _edited_parts(draft)]
    config, _ = deepspeed_layer([*found, *edits], machine)
    return [*found, *([config] if config is not None else ()), *edits]


def searched(draft: Draft, machine: resolve.Machine, change: Mapping[str, Any]) -> RunSpec:
    """The draft's run with some options set by a search, and combinations that cannot work left in."""
    found = [*layers(draft, machine), resolve.Layer(ValueSource.MACHINE, "searched", dict(change))]
    return resolve.assemble(found, name=draft.recipe or "custom", machine=machine)


def _edited_parts(draft: Draft) -> Iterator[dict[str, Any]]:
    """The edits as nested option values."""
    for key, value in draft.edits.items():
        if key == RAW:
            yield from (resolve.parse_set(f"{RAW}.{word}") for word in str(value).split())
        elif "." in key:
            yield resolve.parse_set(f"{key}={option_values.raw_text(value)}")
        else:
            yield {key: absolute(key, value)}


def choices(key: str) -> tuple[tuple[str, str], ...]:
    """What a row can be, each with a description; empty when any text or number will do."""
    if key in _CATALOGUES:
        found = [(entry.name, entry.description) for entry in catalog.entries(_CATALOGUES[key])]
        extra = {"gpu": [("auto", "what this machine has")], RECIPE: [(NO_RECIPE, "defaults alone")]}
        return (*extra.get(key, []), *found)
    if key == RAW:
        return ()
    if key == "liger_kernels":
        return ((liger.ALL, "what Liger switches on for the family"), *liger.ABOUT.items())
    wanted = option_values.field_types()[key]
    if wanted is bool:
        return (("true", ""), ("false", ""))
    return tuple((str(choice), "") for choice in get_args(wanted)) if get_origin(wanted) is Literal else ()


def broken(key: str) -> str:
    """Which of the files behind the choices cannot be used, and why; empty when all are good."""
    if key not in _CATALOGUES:
        return ""
    bad = (entry for entry in catalog.entries(_CATALOGUES[key]) if entry.error)
    return "; ".join(entry.error.replace(f"{Path(entry.path).parent}/", "") for entry in bad)


def is_open(key: str) -> bool:
    """Whether a row takes more than its choices: a path, or several of them joined by commas."""
    return key in ("model", RECIPE, "liger_kernels")


def shown(key: str, plan: Plan, last_spec: RunSpec | None) -> str:
    """The value of a row as text: what was typed, else what it resolved to."""
    draft = plan.draft
    if key == RECIPE:
        return draft.recipe or NO_RECIPE
    spec = plan.spec or last_spec
    if key == RAW:
        typed = draft.edits.get(RAW)
        return str(typed) if typed is not None and plan.spec is None else _raw_words(spec)
    if key in draft.edits and (plan.spec is None or spec is None):
        return _text(draft.edits[key])
    return _text(getattr(spec.options, key)) if spec is not None else ""


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _raw_words(spec: RunSpec | None) -> str:
    if spec is None:
        return ""
    words: list[str] = []

    def walk(table: Mapping[str, Any], path: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict) and value:
                walk(value, f"{path}{key}.")
            else:
                words.append(f"{path}{key}={option_values.raw_text(value)}")

    walk(spec.options.deepspeed, "")
    return " ".join(words)


def stepped(key: str, text: str, by: int) -> str | None:
    """The neighbour of a value: the next choice, or twice or half a number; None where there is none."""
    known = [choice for choice, _ in choices(key)]
    if known:
        at = known.index(text) if text in known else -1 if by > 0 else 0
        return known[(at + by) % len(known)]
    try:
        number = float(text)
    except ValueError:
        return None
    if key == "zero":
        return str(min(3, max(0, round(number) + by)))
    if "." in text or "e" in text:
        return f"{number * 2.0**by:g}"
    if number == 0:
        return "8" if key == "lora_rank" and by > 0 else str(max(0, by))
    return str(max(int(number) * 2 if by > 0 else int(number) // 2, 0 if key in _MAY_BE_ZERO else 1))

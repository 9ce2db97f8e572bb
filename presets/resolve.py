"""Layers of option values to one run spec: merged weakest to strongest, checked, nothing left to look up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from llmtop.presets import catalog, option_values, presetfiles, rules, zero
from llmtop.presets.errors import UsageError, nearest
from llmtop.presets.spec import GpuSpec, ModelShape, Provenance, RunOptions, RunSpec, ValueSource

_STRENGTH = {source: rank for rank, source in enumerate(ValueSource)}


class Machine(Struct, frozen=True, kw_only=True):
    """What `gpu = "auto"` stands for."""

    gpu: str
    """A GPU preset, or the device's own name where no preset has it."""
    gpus: int
    host_memory_bytes: int | None
    gpu_memory_bytes: int | None = None
    compute_capability: str | None = None
    torch_with_cuda: bool = False
    """Whether the installed torch was built with CUDA: its libraries fill a CPU rank's process too."""
    driver_silent: bool = False
    """Whether the driver hangs: the machine may have GPUs that nobody can count, and is not one without."""
    named: GpuSpec | None = None
    """What the preset `gpu` says, where somebody has read it already."""


class Layer(Struct, frozen=True):
    """Option values from one place."""

    source: ValueSource
    detail: str
    """The file, option text or probe that gave them."""
    values: dict[str, Any]
    """Option name to value; texts are parsed when they come from the command line."""


def resolve(layers: Iterable[Layer], *, name: str, machine: Machine) -> RunSpec:
    """The run that the layers describe; raises UsageError for the first thing wrong with it."""
    spec = assemble(layers, name=name, machine=machine)
    for refusal in rules.refusals(spec):
        raise UsageError(_unasked_cpu(spec, refusal.what), why=refusal.why, fix=refusal.fix)
    return spec


def _unasked_cpu(spec: RunSpec, what: str) -> str:
    """With how it came to the CPU, where nobody chose that."""
    unasked = spec.on_cpu and spec.provenance["gpu"].source is ValueSource.MACHINE
    return f"this machine has no GPU: {what}" if unasked and "CPU" in what else what


def assemble(layers: Iterable[Layer], *, name: str, machine: Machine) -> RunSpec:
    """As `resolve`, but with combinations that cannot work left in, for a view that shows them."""
    values, provenance = _merge(sorted(layers, key=lambda layer: _STRENGTH[layer.source]))
    if "model" not in values:
        raise UsageError(
            "nothing says which model to train",
            why="no recipe and no option names one",
            fix="name a recipe, or give --model",
        )
    model = catalog.load_model(values["model"])
    gpu = _gpu(values, provenance, machine)
    _fit_defaults(values, provenance, model.shape, gpu)
    options = RunOptions(**values)
    zero.zero_settings(options.zero, options.deepspeed, model.shape.hidden_size)
    for key in RunOptions.__struct_fields__:
        provenance.setdefault(key, Provenance(source=ValueSource.DEFAULT))
    return RunSpec(
        name=name,
        options=options,
        model=model.shape,
        gpu=gpu,
        model_source=model.source,
        hf_config=model.hf_config,
        weights_dir=model.weights_dir,
        provenance=provenance,
    )


def recipe_layers(recipe: catalog.Recipe) -> list[Layer]:
    """One layer for each file that a recipe's values came from."""
    by_file: dict[str, dict[str, Any]] = {}
    for key, value in recipe.values.items():
        by_file.setdefault(recipe.sources[key], {})[key] = value
    return [Layer(ValueSource.RECIPE, file, values) for file, values in by_file.items()]


def parse_set(text: str, where: str = "") -> dict[str, Any]:
    """`KEY=VALUE` as nested option values; raises UsageError that names what would be right.

    `where` is what its error is said of.
    """
    where = where or f"--set {text}"
    path, equals, value = text.partition("=")
    keys = [part.strip() for part in path.split(".")]
    if not equals or not all(keys):
        raise UsageError(f"{where}: not of the form KEY=VALUE", fix="for example --set micro_batch=2")
    first = keys[0].replace("-", "_")
    if first == "deepspeed":
        if len(keys) == 1:
            raise UsageError(
                f"{where}: deepspeed is a table",
                fix="name the key in it: deepspeed.zero_optimization.reduce_bucket_size=2e8",
            )
        nested: Any = option_values.raw_value(value)
        for key in reversed(keys):
            nested = {key: nested}
        return {"deepspeed": option_values.check_raw(nested["deepspeed"], where)}
    if len(keys) > 1:
        raise _dotted(where, keys)
    return {first: option_values.parse(first, value, where)}


def _dotted(where: str, keys: list[str]) -> UsageError:
    if keys[0] in ("model", "hf_config", "gpu"):
        return UsageError(
            f"{where}: a key of the {keys[0]} cannot be set",
            why=f"--{'gpu' if keys[0] == 'gpu' else 'model'} takes a preset or a file as a whole",
            fix="copy the preset or config.json, change it there, and name the copy",
        )
    if keys[0] in option_values.field_types():
        return UsageError(f"{where}: {keys[0]} has no keys below it", fix=f"--set {keys[0]}=VALUE")
    below = keys[1:] if nearest(keys[0], ["deepspeed"]) else keys
    return UsageError(
        f"{where}: unknown key '{keys[0]}'",
        why="only deepspeed has keys below it",
        fix=f"did you mean 'deepspeed.{'.'.join(below)}'?",
    )


def _merge(layers: Iterable[Layer]) -> tuple[dict[str, Any], dict[str, Provenance]]:
    values: dict[str, Any] = {}
    provenance: dict[str, Provenance] = {}
    for layer in layers:
        from_text = layer.source is ValueSource.COMMAND_LINE
        came_from = Provenance(source=layer.source, detail=layer.detail)
        for key, value in layer.values.items():
            where = layer.detail or str(layer.source)
            if from_text and isinstance(value, str):
                checked = option_values.parse(key, value, where)
            else:
                checked = option_values.check(key, value, where)
            values = option_values.merge(values, {key: checked})
            provenance[key] = came_from
            if isinstance(checked, dict):
                provenance |= dict.fromkeys(_leaves(checked, key), came_from)
    return values, provenance


def _leaves(table: dict[str, Any], path: str) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}.{key}")
        else:
            yield f"{path}.{key}"


def _gpu(values: dict[str, Any], provenance: dict[str, Provenance], machine: Machine) -> GpuSpec:
    """The GPU that the values name; fills `gpu` and `gpus` where they are left to the machine."""
    from_machine = Provenance(source=ValueSource.MACHINE, detail="what this machine has")
    if values.get("gpu", "auto") == "auto":
        values["gpu"] = require_known(machine).gpu
        provenance["gpu"] = from_machine
        if "gpus" not in values:
            values["gpus"] = machine.gpus
            provenance["gpus"] = from_machine
        gpu = machine_gpu(machine)
    else:
        known = machine.named if machine.gpu == values["gpu"] else None
        gpu = known if known is not None else catalog.load_gpu(values["gpu"])
    values["gpu"] = gpu.name
    return _with_host(gpu, machine)


_NAMED = "name one (--gpu NAME), or run without (--gpu cpu); llmtop doctor says more"


def require_known(machine: Machine, fix: str = _NAMED) -> Machine:
    """The same. Raises UsageError, with what to do, where nobody knows which GPUs it has."""
    if machine.driver_silent:
        raise UsageError(
            "the driver of this machine's GPUs does not answer",
            why="so which GPUs are here is not known",
            fix=fix,
        )
    return machine


def machine_gpu(machine: Machine) -> GpuSpec:
    """The GPU that a machine has."""
    if presetfiles.has("gpus", machine.gpu):
        return _with_host(catalog.load_gpu(machine.gpu), machine)
    # A device that no preset describes: what it says of itself, and nothing guessed.
    return GpuSpec(
        name=machine.gpu,
        memory_bytes=machine.gpu_memory_bytes,
        compute_capability=machine.compute_capability,
        sources={"memory_bytes": "read from the device", "compute_capability": "read from the device"},
    )


def _with_host(gpu: GpuSpec, machine: Machine) -> GpuSpec:
    """On the CPU kind the machine's own memory and torch are the device's."""
    if gpu.kind != "cpu":
        return gpu
    return msgspec.structs.replace(
        gpu, memory_bytes=machine.host_memory_bytes, torch_with_cuda=machine.torch_with_cuda
    )


def _fit_defaults(
    values: dict[str, Any], provenance: dict[str, Provenance], model: ModelShape, gpu: GpuSpec
) -> None:
    """Where nobody chose, take what this model and this hardware can do."""

    def fit(key: str, value: Any, why: str) -> None:
        if key not in values:
            values[key] = value
            provenance[key] = Provenance(source=ValueSource.DEFAULT, detail=why)

    if gpu.kind == "cpu":
        fit("precision", "fp32", "16-bit arithmetic is several times slower on a CPU")
    elif not rules.has_bf16(gpu):
        fit("precision", "fp16", f"{gpu.name} computes no bf16")
    attention = rules.default_attention(model)
    if attention != "sdpa":
        fit("attention", attention, f"transformers has no SDPA for {model.family}")
    most = model.max_positions if model.learned_positions else None
    if most is not None and 2 <= most < option_values.defaults()["seq_len"]:
        fit("seq_len", most, f"{model.name} has {most} positions")

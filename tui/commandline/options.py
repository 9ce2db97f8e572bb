"""The one table of run options: command-line arguments in, layers for `presets.resolve` out.

Each row names a field of `RunOptions`, which has its type and default; values are parsed where all
layers are. An option that was not given is absent from the parsed arguments, so it can never
override a preset.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from llmtop.presets import catalog, presetfiles, resolve
from llmtop.presets.errors import UsageError
from llmtop.presets.liger import KERNELS
from llmtop.presets.option_values import defaults, is_switch, raw_text
from llmtop.presets.paths import expand_user, is_file
from llmtop.presets.spec import GpuSpec, RunSpec, ValueSource
from llmtop.tui.commandline.layering import absolute, check_raw_keys, deepspeed_layer, strongest
from llmtop.tui.commandline.telling import tell


class OptionRow(Struct, frozen=True):
    """One option: the field that it sets, how its value is called in help, and its help."""

    key: str
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")


class OptionGroup(Struct, frozen=True):
    title: str
    rows: tuple[OptionRow, ...]


GROUPS: tuple[OptionGroup, ...] = (
    OptionGroup(
        "model and hardware",
        (
            OptionRow(
                "model", "MODEL", "a model preset, a Hugging Face config.json, or a folder that holds one"
            ),
            OptionRow("gpu", "GPU", "a GPU preset, or cpu; default: what this machine has"),
            OptionRow("gpus", "N", "GPUs a node (on the CPU: processes)"),
            OptionRow("nodes", "N", "nodes"),
            OptionRow("total_gpus", "N", "GPUs of all nodes, where --gpus is the most that one of them has"),
            OptionRow(
                "inter_node_gbps",
                "GBPS",
                "gigabits a second of a node to others, all cards together; default: as its GPUs are sold",
            ),
        ),
    ),
    OptionGroup(
        "memory",
        (
            OptionRow("zero", "STAGE", "ZeRO stage, 0 to 3"),
            OptionRow("offload_optimizer", "WHERE", "optimizer state: none, cpu or nvme"),
            OptionRow("offload_param", "WHERE", "parameters (stage 3): none, cpu or nvme"),
            OptionRow("nvme_path", "DIR", "folder for NVMe offload"),
            OptionRow("precision", "TYPE", "fp32, fp16 or bf16"),
            OptionRow(
                "attention", "NAME", "eager, sdpa, flash_attention_2, flash_attention_3, flash_attention_4"
            ),
            OptionRow("liger", "", "Liger kernels"),
            OptionRow(
                "liger_kernels",
                "NAMES",
                f"all that are usual for the family, or {', '.join(KERNELS)} joined by commas",
            ),
            OptionRow("gradient_checkpointing", "", "recompute activations in the backward pass"),
            OptionRow("checkpointing_reentrant", "", "the reentrant kind of gradient checkpointing"),
            OptionRow("checkpointing_every", "K", "recompute layers 0, K, 2K, ... and keep the others"),
            OptionRow("quantization", "KIND", "frozen weights in none, int8 or nf4 (double quantization)"),
            OptionRow(
                "qat", "KIND", "train for fewer bits: none, int8-int4 (inputs, weights) or int4-weight-only"
            ),
            OptionRow("qat_group", "N", "with --qat: weights of a row that share one scale"),
            OptionRow("lora_rank", "R", "rank of LoRA adapters; 0 trains every weight"),
            OptionRow("lora_alpha", "A", "scale of LoRA adapters; default: twice the rank"),
            OptionRow(
                "lora_targets", "NAMES", "all-linear, attention, mlp, or module names joined by commas"
            ),
        ),
    ),
    OptionGroup(
        "training",
        (
            OptionRow("micro_batch", "N", "sequences a GPU in one forward pass"),
            OptionRow("grad_accum", "N", "micro-batches a step"),
            OptionRow("seq_len", "TOKENS", "tokens a sequence"),
            OptionRow("steps", "N", "optimizer steps"),
            OptionRow(
                "optimizer",
                "NAME",
                "adamw (DeepSpeed's), adamw_torch, adamw_8bit, paged_adamw_8bit, paged_adamw_32bit",
            ),
            OptionRow("learning_rate", "RATE", "peak learning rate"),
            OptionRow("lr_schedule", "NAME", "constant, linear or cosine"),
            OptionRow("warmup_steps", "N", "steps of linear warm-up"),
            OptionRow("weight_decay", "W", "AdamW's weight decay"),
            OptionRow("adam_beta1", "B", "AdamW's first beta"),
            OptionRow("adam_beta2", "B", "AdamW's second beta"),
            OptionRow("adam_epsilon", "E", "AdamW's epsilon"),
            OptionRow("max_grad_norm", "NORM", "gradient clipping; 0 turns it off"),
            OptionRow("seed", "N", "seed of weights and data order"),
        ),
    ),
    OptionGroup(
        "data and checkpoints",
        (
            OptionRow("data", "PATH", "a text or JSONL file, a folder of them, or a saved datasets folder"),
            OptionRow("text_field", "NAME", "field of a record that holds the text"),
            OptionRow("tokenizer", "DIR", "a folder with a tokenizer, auto, or bytes"),
            OptionRow("checkpoint_every", "N", "steps between checkpoints; 0: only when asked to"),
            OptionRow("keep_checkpoints", "N", "how many checkpoints stay, the newest ones; 0: all"),
            OptionRow("save_at_end", "", "save a checkpoint after the last step"),
        ),
    ),
    OptionGroup(
        "watching",
        (
            OptionRow("classify_every", "N", "steps between exact classifications of memory"),
            OptionRow("kernel_profile_step", "N", "step whose kernels are named by the profiler; 0: none"),
            OptionRow("sample_seconds", "S", "seconds between hardware samples"),
            OptionRow("hang_factor", "X", "a hang is no step for X times the median step"),
            OptionRow("hang_floor_seconds", "S", "never a hang before S seconds without a step"),
            OptionRow("threads_per_rank", "N", "CPU threads a rank; 0 divides the cores"),
            OptionRow("heal", "", "where memory runs out in a step, halve the micro-batch and go on"),
        ),
    ),
    OptionGroup(
        "DeepSpeed",
        (
            OptionRow(
                "deepspeed_config",
                "FILE",
                "a DeepSpeed JSON whose keys win over presets; other options win over it",
            ),
        ),
    ),
)

ROWS: tuple[OptionRow, ...] = tuple(row for group in GROUPS for row in group.rows)

_DEFAULTS = defaults()
_UNLESS = {
    "gpus": "; those of this machine where --gpu is not given",
    "precision": "; fp32 on a CPU, fp16 on a GPU without bf16",
    "attention": "; eager where the family has no sdpa",
    "seq_len": "; fewer where the model has fewer positions",
}
"""When another value than the default is taken though nobody chose."""

_UNQUOTED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-")
"""What a shell takes as it is: those of `shlex`."""
SETTINGS = "settings"
"""Name of the parsed list of `--set`; no option has it."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """RECIPE, every run option and `--set`."""
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="a recipe preset or a TOML file; or a model preset or folder, with the defaults of all else",
    )
    for group in GROUPS:
        section = parser.add_argument_group(group.title)
        for row in group.rows:
            if is_switch(row.key):
                section.add_argument(
                    row.flag,
                    dest=row.key,
                    action=argparse.BooleanOptionalAction,
                    default=argparse.SUPPRESS,
                    help=_help(row),
                )
            else:
                section.add_argument(
                    row.flag, dest=row.key, metavar=row.metavar, default=argparse.SUPPRESS, help=_help(row)
                )
        if group is GROUPS[-1]:
            section.add_argument(
                "--set",
                dest=SETTINGS,
                metavar="KEY=VALUE",
                action="append",
                default=[],
                help="any key by its dotted name, as deepspeed.zero_optimization.reduce_bucket_size=2e8",
            )


def _help(row: OptionRow) -> str:
    """The row's help, with the default where it does not tell it itself."""
    default = _DEFAULTS.get(row.key)
    if default is None or "default" in row.help:
        return row.help
    if isinstance(default, bool):
        default = "on" if default else "off"
    words = _UNLESS.get(row.key, "")
    return f"{row.help} (default: {default}{words})"


def resolve_run(args: argparse.Namespace) -> RunSpec:
    """The run that the parsed arguments describe; raises UsageError for the first thing wrong with it."""
    spec = _run(args, resolve.resolve, (), tell_problems=True)
    check_raw_keys(spec)
    note_cpu(spec)
    return spec


def note_cpu(spec: RunSpec) -> None:
    """Say that a plan is for the CPU where nobody chose that."""
    if spec.on_cpu and spec.provenance["gpu"].source is ValueSource.MACHINE:
        tell(
            "note: this machine has no GPU, so this is for its CPU; --gpu NAME plans for a GPU"
            " (llmtop presets gpus)"
        )


def assemble_run(args: argparse.Namespace, change: Mapping[str, Any]) -> RunSpec:
    """The same with some options changed, and with combinations that cannot work left in."""
    # What a search sets is no choice of a person, so that it is not shown as one.
    layers = [resolve.Layer(ValueSource.MACHINE, "searched", {key: value}) for key, value in change.items()]
    return _run(args, resolve.assemble, layers, tell_problems=False)


def _run(
    args: argparse.Namespace,
    make: Callable[..., RunSpec],
    more: Sequence[resolve.Layer],
    *,
    tell_problems: bool,
) -> RunSpec:
    _take_model(args)
    command_line = _command_line_layers(args)
    recipe = catalog.load_recipe(args.recipe) if args.recipe is not None else None
    layers = [*(resolve.recipe_layers(recipe) if recipe is not None else ()), *command_line, *more]
    if strongest(layers, "model") is None:
        raise UsageError(
            "nothing says which model to train",
            why="neither a RECIPE nor --model was given",
            fix="name a recipe (llmtop presets recipes) or a model (--model, see llmtop presets models)",
        )
    machine = _machine(layers)
    config, problems = deepspeed_layer(layers, machine)
    for problem in problems if tell_problems else ():
        tell(f"warning: {strongest(layers, 'deepspeed_config')}: {problem}")
    layers += [config] if config is not None else []
    return make(layers, name=recipe.name if recipe is not None else "custom", machine=machine)


def _take_model(args: argparse.Namespace) -> None:
    """A model in the place of a recipe: its name is one where no recipe has it."""
    name = args.recipe
    if name is not None and "model" not in args and _names_model_alone(name):
        args.model, args.recipe = name, None


def _names_model_alone(name: str) -> bool:
    if presetfiles.has("recipes", name):
        return False
    # A folder can be no recipe.
    return presetfiles.has("models", name) or is_file(Path(expand_user(name)) / "config.json")


def option_text(key: str, value: object) -> str:
    """The command-line words that set `key`, as somebody would type them."""
    flag = "--" + key.replace("_", "-")
    if isinstance(value, bool):
        return flag if value else "--no-" + flag[2:]
    text = _quoted(str(value))
    # A value that looks like an option is taken for one where it stands alone.
    return f"{flag}={text}" if text.startswith("-") else f"{flag} {text}"


def setting_texts(key: str, value: object) -> Iterator[str]:
    """`--set` words for a raw value of any depth: one for each leaf of a table.

    A table with a key that would not be read back as one is a leaf itself.
    """
    if isinstance(value, dict) and value and all(map(_is_dotless, value)):
        for inner, leaf in value.items():
            yield from setting_texts(f"{key}.{inner}", leaf)
    else:
        yield f"--set {_quoted(f'{key}={raw_text(value)}')}"


def _quoted(text: str) -> str:
    """As a shell takes it for one word."""
    if text and _UNQUOTED.issuperset(text):
        return text
    from shlex import quote  # seldom needed, and slow to load

    return quote(text)


def change_text(spec: RunSpec, change: Mapping[str, Any]) -> str:
    """The command-line words that a suggestion stands for; what the run has already is left out."""
    words: list[str] = []
    for key, value in change.items():
        if "." in key:
            words += setting_texts(key, value)
        elif getattr(spec.options, key) != value:
            words.append(option_text(key, value))
    return " ".join(words)


def _is_dotless(key: str) -> bool:
    """Whether `parse_set` reads the key as it is, as one part of a dotted name."""
    return bool(key) and key == key.strip() and "." not in key and "=" not in key


def _command_line_layers(args: argparse.Namespace) -> list[resolve.Layer]:
    """One layer for each option given, in the order of the table, then the `--set`s as they came."""
    given: dict[str, Any] = vars(args)
    layers = []
    for row in ROWS:
        if row.key in given:
            detail = option_text(row.key, given[row.key])
            value = absolute(row.key, given[row.key])
            layers.append(resolve.Layer(ValueSource.COMMAND_LINE, detail, {row.key: value}))
    for text in given[SETTINGS]:
        layers.append(resolve.Layer(ValueSource.COMMAND_LINE, f"--set {text}", resolve.parse_set(text)))
    return layers


def _machine(layers: Sequence[resolve.Layer]) -> resolve.Machine:
    """What this machine has, asked only as far as the run depends on it."""
    gpu = strongest(layers, "gpu")
    named = _named(str(gpu)) if gpu not in (None, "auto") else None
    # Of the CPU kind memory and torch are this machine's own.
    if gpu not in (None, "auto") and (named is None or named.kind != "cpu"):
        return resolve.Machine(gpu=str(gpu), gpus=1, host_memory_bytes=None, named=named)
    from llmtop.profiler.hardware import hostmemory, machine  # nothing of it is asked for a named GPU

    if gpu in (None, "auto"):
        return resolve.require_known(machine.detect_machine())
    return resolve.Machine(
        gpu=str(gpu),
        gpus=1,
        host_memory_bytes=hostmemory.host_memory_bytes(),
        torch_with_cuda=machine.torch_with_cuda(),
    )


def _named(gpu: str) -> GpuSpec | None:
    """The preset of that name."""
    try:
        return catalog.load_gpu(gpu)
    except UsageError:
        return None  # told in its turn, when the run is put together

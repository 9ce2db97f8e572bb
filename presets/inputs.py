"""What a run starts from, in words and as places: its weights, its data and its tokenizer."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from llmtop.presets.errors import UsageError
from llmtop.presets.paths import expand_user, is_file, is_folder
from llmtop.presets.spec import RunSpec

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
SMALLEST_BPE_VOCAB = 257
"""Every byte and the end of text."""


class Inputs(Struct, frozen=True, kw_only=True):
    """A line on each thing that a run reads."""

    weights: str
    data: str
    tokenizer: str


def inputs(spec: RunSpec) -> Inputs:
    """The lines that every view of a run shows alike."""
    if spec.script is not None:
        own = "the command's own"
        return Inputs(weights=own, data=own, tokenizer=own)
    return Inputs(weights=_weights(spec), data=_data(spec), tokenizer=_tokenizer(spec))


def brief_inputs(spec: RunSpec) -> Inputs:
    """The same for little room: without what else there could be."""
    full = inputs(spec)
    if spec.script is not None:
        return full
    made = full.tokenizer.startswith(("bytes ", "made "))
    return Inputs(
        weights=full.weights if spec.weights_dir else "random (real: a folder)",
        data=spec.options.data,
        tokenizer=full.tokenizer.partition(" (")[0] if made else full.tokenizer,
    )


def holds_tokenizer(folder: Path) -> bool:
    return is_folder(folder) and any(is_file(folder / name) for name in TOKENIZER_FILES)


def own_tokenizer_folder(spec: RunSpec) -> Path | None:
    """The folder of the model's own tokenizer; None where the model brings none."""
    places = [Path(spec.weights_dir)] if spec.weights_dir else []
    source = Path(spec.model_source)
    places += [source if is_folder(source) else source.parent]
    return next((place for place in places if holds_tokenizer(place)), None)


def lacks_tokenizer(spec: RunSpec) -> bool:
    """Whether real weights would be trained on a made tokenizer's tokens, which mean nothing to them."""
    if spec.script is not None or spec.weights_dir is None or spec.options.tokenizer != "auto":
        return False
    return is_folder(Path(spec.weights_dir)) and own_tokenizer_folder(spec) is None


def require_tokenizer(spec: RunSpec) -> None:
    """Raise UsageError for real weights that come without their tokenizer, unless another choice is named."""
    if lacks_tokenizer(spec):
        raise UsageError(
            f"the model folder {spec.weights_dir} has weights and no tokenizer",
            why=f"none of {', '.join(TOKENIZER_FILES)} is in it, and to weights that were trained with"
            " another one, tokens of a tokenizer made from the data mean nothing",
            fix="put the model's tokenizer.json into it, or --tokenizer FOLDER with that tokenizer",
        )


def _weights(spec: RunSpec) -> str:
    if spec.weights_dir is not None:
        return f"from {spec.weights_dir}"
    source = Path(spec.model_source)
    if source.suffix != ".toml":
        from llmtop.presets.catalog import holds_weights  # slow to load, and most models are presets

        if holds_weights(source.parent):
            return f"random (those beside {source.name} are not read; for them --model {source.parent})"
    what = "the preset has none" if source.suffix == ".toml" else f"there are none with {source.name}"
    return f"random ({what}; for real ones --model FOLDER with config.json and safetensors)"


def _data(spec: RunSpec) -> str:
    source = spec.options.data
    if source == "builtin:english":
        return f"{source} (Python's own help texts; for yours --data PATH)"
    path = Path(expand_user(source))
    records = is_folder(path) or path.suffix.lower() in (".jsonl", ".ndjson", ".json")
    return f"{source}, field '{spec.options.text_field}' of its records" if records else source


def _tokenizer(spec: RunSpec) -> str:
    choice, vocab_size = spec.options.tokenizer, spec.model.vocab_size
    if choice not in ("auto", "bytes"):
        return f"from {choice}"
    own = own_tokenizer_folder(spec) if choice == "auto" else None
    if own is not None:
        return f"the model's own, from {own}"
    if lacks_tokenizer(spec):
        return f"none: {spec.weights_dir} has no tokenizer.json (--tokenizer FOLDER names another place)"
    if choice == "auto" and spec.weights_dir is not None:
        return f"the model's own, from {spec.weights_dir}, which is not on this machine"
    if choice == "bytes" or vocab_size < SMALLEST_BPE_VOCAB:
        return "bytes (each byte of the text is a token)"
    return (
        f"made from the data (byte-level BPE, at most {vocab_size:,} tokens; for a real one --tokenizer DIR)"
    )

"""Packs a model into a file or folder: says before what it takes, and has it made aside until it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets import catalog
from llmtop.presets.errors import JobFailedError, LlmtopError, UsageError
from llmtop.presets.foreign import read_json
from llmtop.presets.inputs import holds_tokenizer
from llmtop.presets.resolve import require_known
from llmtop.presets.version import install_words
from llmtop.profiler.cost.shape import param_count
from llmtop.profiler.cost.where import gpu_names
from llmtop.profiler.hardware.machine import detect_machine
from llmtop.profiler.memory.loading import loaded_as, packed_bytes
from llmtop.profiler.quantized import SUFFIX, Quantized
from llmtop.profiler.record.wholefile import SHARED_MODE, document, sync_folder, write_atomic
from llmtop.profiler.units import format_bytes
from llmtop.trainer.folders import check_place
from llmtop.trainer.partial import held_partial, sync_all
from llmtop.trainer.quantize.job import Measured, MeasureJob, Packed, PackJob
from llmtop.trainer.quantize.measuring import measuring_bytes
from llmtop.trainer.quantize.plan import check_tensors, matrices, plan_gguf
from llmtop.trainer.quantize.source import Source
from llmtop.trainer.quantize.target import Target
from llmtop.trainer.quantize.working import Progress, have_done
from llmtop.trainer.room import memory_left_bytes, why_no_room

CONTEXT, WINDOW, SECONDS = 8192, 512, 120.0
_GGUF_BYTES = 384 << 20
"""Host memory of the process that writes one: pieces of tensors, and a vocabulary of 256,000 tokens."""
_TORCH_BYTES = 1 << 30
"""Of one that has torch and transformers loaded."""
_SHARD_BYTES = 10**9
"""Of what bitsandbytes' folder is saved in: it is in memory twice as it is written."""
_FILE_EXTRA_BYTES = 32 << 20
"""Vocabulary, chat template and padding."""
_WIDE, _NARROW = 4, 2
_SMALLEST_GPUS = 3
_GGUF_MAGIC = b"GGUF"
_MOST_CONFIG_BYTES = 1 << 24
_WEIGHT_FORMAT_BYTES = 1
"""bitsandbytes notes of each 8-bit matrix how its numbers lie."""


ELSEWHERE = "--out in a folder that can be written"
_NO_TOKENIZER = (
    "the folder has no tokenizer; where it came from a run that took bytes as tokens, `llmtop quantize RUN`"
    " knows them"
)


class Choice(Struct, frozen=True, kw_only=True):
    """What is wanted beside the form."""

    force: bool = False
    """In place of an output that is there."""
    perplexity: bool = True
    text: str = ""
    """A file to measure on; empty: the text that comes with llmtop."""
    window: int = WINDOW
    seconds: float = SECONDS
    """The most for each of the two measurements."""
    context: int = CONTEXT
    """Tokens that the GPU's memory is predicted for."""


class Outlook(Struct, frozen=True, kw_only=True):
    """What is known before anything is made."""

    source: str
    form: str
    output: str
    model: str
    family: str
    parameters: int
    before_bytes: int
    predicted_bytes: int
    context: int
    load_bytes: int
    fits_on: tuple[str, ...]
    host_bytes: int
    """Memory that packing takes here."""
    notes: tuple[str, ...] = ()


_DRIVER_FIX = "pack where the driver answers; llmtop doctor says more"


def outlook(source: Source, target: Target, out: Path, choice: Choice) -> Outlook:
    """Raises UsageError or LlmtopError for a model that cannot be packed so."""
    shape, notes = source.shape, tuple[str, ...]()
    require_packer(target)
    if target.packer == "gguf":
        plan = plan_gguf(source, target.kind)
        predicted, notes, host = plan.predicted_bytes, plan.notes, _GGUF_BYTES
    else:
        check_tensors(source)
        predicted = packed_bytes(shape, target.kind)
        if target.kind == "int8":
            predicted += matrices(shape) * _WEIGHT_FORMAT_BYTES
        on_gpu = require_known(detect_machine(), _DRIVER_FIX).gpu != "cpu"
        host = _TORCH_BYTES + 2 * min(predicted, _SHARD_BYTES) + (0 if on_gpu else predicted)
    context = min(choice.context, shape.max_positions or choice.context)
    if context < choice.context != CONTEXT:
        notes = (*notes, f"the model was made for {context:,} tokens: no more are counted as kept")
    needs = loaded_as(shape, target.form, predicted, context=context)
    return Outlook(
        source=str(source.folder),
        form=target.form,
        output=str(out),
        model=shape.name,
        family=shape.family,
        parameters=param_count(shape),
        before_bytes=source.size_bytes,
        predicted_bytes=predicted,
        context=context,
        load_bytes=needs.total_bytes,
        fits_on=_smallest_gpus(needs.total_bytes),
        host_bytes=host,
        notes=notes,
    )


def check_output(out: Path, choice: Choice) -> None:
    """Raise UsageError for an output that is there, or a folder that nothing can be written in.

    With `force`, what was made by this before may be replaced; nothing else is ever removed.
    """
    there = out.exists() or out.is_symlink()
    if there and not choice.force:
        raise UsageError(
            f"{out} is there already",
            why="nothing is written over",
            fix="--out OTHER, or --force in its place",
        )
    if there and not _is_ours(out):
        raise UsageError(
            f"{out} is not replaced, --force or not",
            why="it is neither a GGUF file nor a folder of packed weights, so it was not made by this",
            fix="--out OTHER, or take it away yourself",
        )
    check_place(out, ELSEWHERE)
    if choice.text and not Path(choice.text).is_file():
        raise UsageError(f"--text {choice.text}: no such file", fix="give a file of plain text")


def _is_ours(out: Path) -> bool:
    """Whether what is there is what this makes: of a link, what it leads to, though the link alone goes."""
    if out.is_dir():
        return not any(out.iterdir()) or _packed(out / "config.json")
    if not out.is_file():
        return out.is_symlink()  # to nothing
    with out.open("rb") as file:
        return file.read(len(_GGUF_MAGIC)) in (_GGUF_MAGIC, b"")


def _packed(config: Path) -> bool:
    try:
        return "quantization_config" in read_json(config, dict[str, Any], _MOST_CONFIG_BYTES)
    except (OSError, msgspec.DecodeError):
        return False


def check_room(found: Outlook, out: Path) -> None:
    """Raise LlmtopError where disk or memory will not do."""
    why = why_no_room(out.absolute().parent, found.predicted_bytes + _FILE_EXTRA_BYTES)
    if why is not None:
        raise LlmtopError(
            f"there is no room for {out}",
            why=why,
            fix="--out on a larger drive, or fewer bits: --to gguf:Q4_0",
        )
    left = memory_left_bytes()
    if left < found.host_bytes:
        raise LlmtopError(
            "there is too little host memory to pack the model",
            why=f"it takes {format_bytes(found.host_bytes)}, and {format_bytes(left)} is available",
            fix="end what else takes memory, or do it on another machine",
        )


@contextmanager
def aside(out: Path) -> Iterator[Path]:
    """A folder beside the output for what is not whole yet; it goes at the end, whatever comes.

    Raises UsageError where another llmtop writes the same, LlmtopError where it cannot be made.
    """
    try:
        with held_partial(out) as folder:
            try:
                yield folder
            finally:
                with suppress(OSError):
                    shutil.rmtree(folder)
    except OSError as error:
        raise LlmtopError(
            f"{out} cannot be written", why=error.strerror or str(error), fix="--out in a folder that can be"
        ) from error


def quantize(
    source: Source, target: Target, out: Path, folder: Path, choice: Choice, on_progress: Progress
) -> Quantized:
    """Make `out` by way of `folder`, which `aside` gave, and measure what was lost.

    Raises LlmtopError where it cannot be made. Where perplexity cannot be measured, the result says why.
    """
    check_output(out, choice)
    found = outlook(source, target, out, choice)
    check_room(found, out)
    made = folder / "made"
    packed = have_done(PackJob(source=str(source.folder), form=target.form, target=str(made)), on_progress)
    if not isinstance(packed, Packed):
        raise JobFailedError("the model could not be packed", why=f"the answer was {packed}")
    sync_all(made)
    result = Quantized(
        source=found.source,
        form=found.form,
        output=found.output,
        model=found.model,
        family=found.family,
        parameters=found.parameters,
        before_bytes=found.before_bytes,
        predicted_bytes=found.predicted_bytes,
        tensor_bytes=packed.tensor_bytes,
        file_bytes=_size_bytes(made),
        context=found.context,
        load_bytes=found.load_bytes,
        fits_on=found.fits_on,
        errors=packed.errors,
        seconds=packed.seconds,
        peak_host_bytes=packed.peak_host_bytes,
        notes=tuple(dict.fromkeys((*found.notes, *packed.notes))),
    )
    _put_in_place(made, out, folder)
    return result


def measured(
    result: Quantized, source: Source, target: Target, out: Path, choice: Choice, on_progress: Progress
) -> Quantized:
    """The result with perplexity, or with the reason why there is none."""
    if not choice.perplexity:
        return replace(result, no_perplexity="it was not asked for")
    if not holds_tokenizer(source.folder):
        return replace(result, no_perplexity=_NO_TOKENIZER)
    dtype, why = _dtype(source, target, choice)
    if why:
        return replace(result, no_perplexity=why)
    job = MeasureJob(
        source=str(source.folder),
        form=target.form,
        made=str(out),
        text=choice.text,
        window=min(choice.window, source.shape.max_positions or choice.window),
        seconds=choice.seconds,
        dtype=dtype,
    )
    try:
        found = have_done(job, on_progress)
    except LlmtopError as error:
        # What was made is whole and has its name; that nobody could measure it is no reason to take it away.
        return replace(result, no_perplexity=error.in_one_line)
    if not isinstance(found, Measured):
        raise JobFailedError("perplexity could not be measured", why=f"the answer was {found}")
    return replace(result, perplexity=found.perplexity)


def keep(result: Quantized, path: Path) -> None:
    """Write the report; in a run's folder, or beside the output by `beside`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(path, document(result), mode=SHARED_MODE)


def beside(out: Path) -> Path:
    return out.with_name(out.name + SUFFIX)


def require_packer(target: Target) -> None:
    """Raise UsageError where what packs the weights is not installed."""
    _require(target.packer, "quantize")


def _require(package: str, extra: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"the package `{package}` is not installed",
            why="it is what packs the weights",
            fix=install_words(extra),
        )


def _smallest_gpus(needed_bytes: int) -> tuple[str, ...]:
    known = [gpu for gpu in map(catalog.load_gpu, gpu_names()) if (gpu.memory_bytes or 0) >= needed_bytes]
    ordered = sorted(known, key=lambda gpu: (gpu.memory_bytes or 0, gpu.name))
    return tuple(gpu.name for gpu in ordered[:_SMALLEST_GPUS])


def _dtype(source: Source, target: Target, choice: Choice) -> tuple[str, str]:
    """What perplexity is computed in, as there is memory, or why there is none."""
    try:
        _require("torch", "train")
        _require("transformers", "train")
    except UsageError as error:
        return "", error.what
    left = memory_left_bytes()
    widths = (_WIDE, _NARROW) if target.packer == "gguf" else (_NARROW,)
    for width in widths:
        needed = measuring_bytes(source.shape, target, choice.window, width)
        if needed <= left:
            return ("float32" if width == _WIDE else "bfloat16"), ""
    return "", f"it takes {format_bytes(needed)} of host memory, and {format_bytes(left)} is free"


def _put_in_place(made: Path, out: Path, folder: Path) -> None:
    """What was there before is out of the way for no longer than two renames take."""
    old = folder / "old"
    if out.is_dir() and not out.is_symlink():
        out.rename(old)
        try:
            made.rename(out)
        except OSError:
            old.rename(out)
            raise
    else:
        if made.is_dir() and (out.exists() or out.is_symlink()):
            out.unlink()
        made.replace(out)
    sync_folder(out.absolute().parent)


def _size_bytes(made: Path) -> int:
    files = [made] if made.is_file() else [path for path in made.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)

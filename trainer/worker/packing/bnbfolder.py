"""A folder in 8 or 4 bits by bitsandbytes, as transformers saves and loads it, and what each matrix lost."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from llmtop.presets.errors import LlmtopError
from llmtop.presets.inputs import TOKENIZER_FILES
from llmtop.presets.tensorfile import read_header
from llmtop.profiler.quantized import TensorError
from llmtop.profiler.units import counted
from llmtop.trainer.quantize.job import Packed, PackJob, Working
from llmtop.trainer.quantize.source import Source, SourceTensor, read_source
from llmtop.trainer.worker.packing.peak import Peak
from llmtop.trainer.worker.packing.reading import pieces
from llmtop.trainer.worker.packing.saying import Say

_SHARD = "1GB"
"""Of a file: what is written is in memory twice."""
_MORE_FILES = (*TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json", "merges.txt")
_TEMPLATES = "chat_template*"
_INT8_STEPS = 127
_NAMED = 3


def write_folder(job: PackJob, say: Say) -> Packed:
    """Raises LlmtopError for weights that do not belong to the model."""
    started = time.monotonic()
    source, target = read_source(Path(job.source)), Path(job.target)
    with Peak() as peak, files_in_words():
        say(Working(doing="packing", done=0, total=source.size_bytes))
        model = _packed(source, job.form)
        errors = _errors(model, source, job.form, say)
        say(Working(doing="writing", done=0, total=source.size_bytes))
        model.save_pretrained(str(target), max_shard_size=_SHARD)
    _copy_tokenizer(source.folder, target)
    return Packed(
        tensor_bytes=tensor_bytes(target),
        errors=tuple(sorted(errors, key=lambda error: -(error.relative_rms or 0.0))),
        peak_host_bytes=peak.bytes,
        seconds=time.monotonic() - started,
    )


@contextmanager
def files_in_words() -> Iterator[None]:
    """What the library of the files says of a full disk, or of a file that is cut short meanwhile."""
    try:
        yield
    except SafetensorError as error:
        raise LlmtopError("cannot read or write the weights", why=str(error)) from error


def tensor_bytes(folder: Path) -> int:
    """Of all tensors in the folder's files, scales and tables included."""
    headers = (read_header(file) for file in sorted(folder.glob("*.safetensors")))
    return sum(
        entry.data_offsets[1] - entry.data_offsets[0]
        for header in headers
        for entry in header.entries.values()
    )


def form_config(form: str) -> Any:
    """What transformers needs to pack so; 4 bits with scales that are packed too, as the trainer has them."""
    from transformers import BitsAndBytesConfig

    if form == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def device_map() -> dict[str, str | int]:
    return {"": 0 if torch.cuda.is_available() else "cpu"}


def _packed(source: Source, form: str) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        str(source.folder),
        quantization_config=form_config(form),
        device_map=device_map(),
        dtype=torch.bfloat16,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    for what, keys in (("lack", info["missing_keys"]), ("have too many", info["unexpected_keys"])):
        if keys:
            named = ", ".join(sorted(keys)[:_NAMED])
            raise LlmtopError(
                f"the weights in {source.folder} {what}: {counted(len(keys), 'tensor')}, as {named}",
                why="the model's configuration says otherwise",
                fix="copy or download the folder again",
            )
    return model


def _errors(model: Any, source: Source, form: str, say: Say) -> list[TensorError]:
    """Of each packed matrix, by the numbers in the source's files."""
    import bitsandbytes as bnb

    kinds = (bnb.nn.Linear8bitLt, bnb.nn.Linear4bit)
    found, done = [], 0
    for name, module in model.named_modules():
        tensor = source.tensors.get(f"{name}.weight")
        if not isinstance(module, kinds) or tensor is None:
            continue
        back = _unpacked(module)
        found.append(
            TensorError(
                name=tensor.key,
                kind=form,
                size_bytes=_stored_bytes(module.weight),
                relative_rms=_relative_rms(tensor, back),
            )
        )
        done += tensor.size_bytes
        say(Working(doing="packing", done=done, total=source.size_bytes))
    return found


def _unpacked(module: Any) -> torch.Tensor:
    import bitsandbytes as bnb

    weight = module.weight
    if isinstance(module, bnb.nn.Linear8bitLt):
        rows = weight.SCB if weight.SCB is not None else module.state.SCB
        unpacked: torch.Tensor = weight.data.float() * (rows.view(-1, 1).float() / _INT8_STEPS)
    else:
        unpacked = bnb.functional.dequantize_4bit(weight.data, weight.quant_state).float()
    return unpacked


def _stored_bytes(weight: Any) -> int:
    return int(weight.numel() * weight.element_size())


def _relative_rms(tensor: SourceTensor, back: torch.Tensor) -> float | None:
    lost = held = 0.0
    first = 0
    for piece in pieces(tensor):
        rows = torch.from_numpy(piece).to(back.device)
        change = back[first : first + len(rows)] - rows
        lost += float(change.double().square().sum())
        held += float(rows.double().square().sum())
        first += len(rows)
    return math.sqrt(lost / held) if held else None


def _copy_tokenizer(source: Path, target: Path) -> None:
    named = [source / name for name in _MORE_FILES]
    for file in (*named, *source.glob(_TEMPLATES)):
        if file.is_file():
            shutil.copyfile(file, target / file.name)

"""Perplexity of a model before and after it was packed, on the same tokens of a held-out text."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from msgspec.structs import replace

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.quantized import Perplexity
from llmtop.trainer.quantize.families import known_family
from llmtop.trainer.quantize.job import Measured, MeasureJob, Working
from llmtop.trainer.quantize.measuring import LOGITS_BYTES, rows_at_once
from llmtop.trainer.quantize.source import Source, read_source
from llmtop.trainer.quantize.target import Target
from llmtop.trainer.worker.packing.peak import Peak
from llmtop.trainer.worker.packing.saying import Say
from llmtop.trainer.worker.packing.streaming import StreamedModel
from llmtop.trainer.worker.packing.unpacking import FolderNumbers, GgufNumbers
from llmtop.trainer.worker.stream import CannotStream, skeleton_of
from llmtop.trainer.worker.text import read_pieces
from llmtop.trainer.worker.tokenizer import FolderTokenizer

OWN_TEXT = Path(__file__).with_name("heldout.txt")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MOST_WINDOWS = 1 << 14
"""Of a text that is longer than anybody waits for."""
_SHORTEST = 2
"""Tokens of a window: one to read and one to foretell."""


class Scorer(Protocol):
    """A model that can be asked how sure it was of a text."""

    def nats(self, ids: torch.Tensor) -> list[float]:
        """Of each row of tokens, all equally long: summed negative logarithms of what each was given."""


def measure(job: MeasureJob, say: Say) -> Measured:
    """Raises LlmtopError for a text or a tokenizer that cannot be read, UsageError for too little text."""
    started = time.monotonic()
    with Peak() as peak:
        found = _measured(job, say)
    return Measured(perplexity=replace(found, peak_host_bytes=peak.bytes, seconds=time.monotonic() - started))


def _measured(job: MeasureJob, say: Say) -> Perplexity:
    source, dtype = read_source(Path(job.source)), _DTYPES[job.dtype]
    text = Path(job.text) if job.text else OWN_TEXT
    tokenizer = FolderTokenizer(source.folder, _end_id(source))
    if tokenizer.vocab_size > source.shape.vocab_size:
        raise LlmtopError(
            f"the tokenizer in {source.folder} does not match the model",
            why=f"it has {tokenizer.vocab_size} tokens, the model {source.shape.vocab_size}",
        )
    windows = list(islice(_windows(text, tokenizer, job.window), _MOST_WINDOWS))
    if not windows:
        raise UsageError(f"{text}: holds no text to measure on", fix="give a longer one: --text FILE")
    most = rows_at_once(source.shape, job.window)
    before = _nats(source_model(source, dtype), _batches(windows, most), job.seconds, "before", say)
    gc.collect()
    # The same tokens beside each other: what is the same model then has the same answers, to the bit.
    again = iter(windows)
    sizes = [list(islice(again, len(each))) for each in before]
    after = _nats(_made_model(job, source, dtype), iter(sizes), job.seconds, "after", say)
    # What one of them had no time for is no part of the comparison.
    read = [window for batch in sizes[: len(after)] for window in batch]
    tokens = sum(len(window) - 1 for window in read)
    return Perplexity(
        before=_perplexity(before[: len(after)], tokens),
        after=_perplexity(after, tokens),
        tokens=tokens,
        window=job.window,
        text=str(text) if job.text else "the text that comes with llmtop",
        cut_by_time=len(read) < len(windows),
        dtype=job.dtype,
        seconds=0.0,
    )


def _perplexity(nats: list[list[float]], tokens: int) -> float:
    try:
        return math.exp(sum(map(sum, nats)) / tokens)
    except OverflowError:
        return math.inf


def _end_id(source: Source) -> int:
    """No end of text is measured: any will do for a tokenizer that has none."""
    found = source.config.get("eos_token_id")
    return found if isinstance(found, int) else 0


def source_model(source: Source, dtype: torch.dtype) -> Scorer:
    """Streamed, where it is known that no module reaches for another's weights; else whole."""
    if known_family(source.shape) is not None:
        with suppress(CannotStream):
            numbers = FolderNumbers(source, partial(unmade, source, dtype), dtype)
            return StreamedModel(skeleton(source, dtype), numbers, _device(), LOGITS_BYTES)
    return WholeModel(_load(source.folder, dtype))


def _made_model(job: MeasureJob, source: Source, dtype: torch.dtype) -> Scorer:
    target = Target(form=job.form)
    if target.packer != "gguf":
        return WholeModel(_load_packed(Path(job.made)))
    numbers = GgufNumbers(source, target.kind, Path(job.made))
    return StreamedModel(skeleton(source, dtype), numbers, _device(), LOGITS_BYTES)


class WholeModel:
    """All of a model in memory."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def nats(self, ids: torch.Tensor) -> list[float]:
        found = []
        for row in ids.to(next(self._model.parameters()).device):
            logits = self._model(input_ids=row[None], use_cache=False).logits[0, :-1].float()
            found.append(float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum")))
        return found


def unmade(source: Source, dtype: torch.dtype) -> Any:
    """The model with random numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = dict(source.config)
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def skeleton(source: Source, dtype: torch.dtype) -> Any:
    """The same without memory."""
    return skeleton_of(partial(unmade, source, dtype))


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _load(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=dtype, local_files_only=True, trust_remote_code=False
    )
    return model.to(_device()).eval()


def _load_packed(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    from llmtop.trainer.worker.packing.bnbfolder import device_map

    return AutoModelForCausalLM.from_pretrained(
        str(folder), device_map=device_map(), local_files_only=True, trust_remote_code=False
    ).eval()


def _windows(text: Path, tokenizer: FolderTokenizer, window: int) -> Iterator[list[int]]:
    """The text's tokens, so many at a time; it is read as it is needed."""
    held: list[int] = []
    for piece in read_pieces(str(text), "text"):
        held += tokenizer.encode([piece.text])[0]
        while len(held) >= window:
            yield held[:window]
            del held[:window]
    if len(held) >= _SHORTEST:
        yield held


def _batches(windows: list[list[int]], most: int) -> Iterator[list[list[int]]]:
    """One window, then two, and so on up to the most: time may be short, and each batch reads all weights."""
    first, size = 0, 1
    while first < len(windows):
        batch = windows[first : first + size]
        # The last window of a text is shorter, and stands alone.
        equal = [window for window in batch if len(window) == len(batch[0])]
        yield equal
        first, size = first + len(equal), min(most, 2 * size)


def _nats(
    model: Scorer, batches: Iterator[list[list[int]]], seconds: float, what: str, say: Say
) -> list[list[float]]:
    """Of each window of each batch, as far as time reaches."""
    found: list[list[float]] = []
    begun, windows, tokens = time.monotonic(), 0, 0
    for batch in batches:
        spent = time.monotonic() - begun
        if found and spent * (windows + len(batch)) / windows > seconds:
            break
        found.append(model.nats(torch.tensor(batch)))
        windows += len(batch)
        tokens += sum(len(window) - 1 for window in batch)
        say(Working(doing=f"perplexity {what}", done=tokens, total=0))
    return found

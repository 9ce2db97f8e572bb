"""Perplexity of a model before and after it was packed, on the same tokens of a held-out text."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.quantized import Perplexity
from llmtop.trainer.quantize.job import Measured, MeasureJob, Working
from llmtop.trainer.quantize.source import Source, read_source
from llmtop.trainer.quantize.target import Target
from llmtop.trainer.worker.packing.saying import Say
from llmtop.trainer.worker.text import read_pieces
from llmtop.trainer.worker.tokenizer import FolderTokenizer

OWN_TEXT = Path(__file__).with_name("heldout.txt")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MOST_WINDOWS = 1 << 14
"""Of a text that is longer than anybody waits for."""
_SHORTEST = 2
"""Tokens of a window: one to read and one to foretell."""


def measure(job: MeasureJob, say: Say) -> Measured:
    """Raises LlmtopError for a text or a tokenizer that cannot be read, UsageError for too little text."""
    started = time.monotonic()
    source, dtype = read_source(Path(job.source)), _DTYPES[job.dtype]
    text = Path(job.text) if job.text else OWN_TEXT
    tokenizer = FolderTokenizer(source.folder, _end_id(source))
    if tokenizer.vocab_size > source.shape.vocab_size:
        raise LlmtopError(
            f"the tokenizer in {source.folder} does not match the model",
            why=f"it has {tokenizer.vocab_size} tokens, the model {source.shape.vocab_size}",
        )
    model = _load(source.folder, dtype)
    windows = list(islice(_windows(text, tokenizer, job.window), _MOST_WINDOWS))
    if not windows:
        raise UsageError(f"{text}: holds no text to measure on", fix="give a longer one: --text FILE")
    before = _nats(model, windows, job.seconds, "before", say)
    made = Path(job.made)
    if Target(form=job.form).packer == "gguf":
        from llmtop.trainer.worker.packing.unpacking import load_gguf

        load_gguf(model, source, Target(form=job.form).kind, made)
    else:
        del model
        gc.collect()
        model = _load_packed(made)
    after = _nats(model, windows[: len(before)], job.seconds, "after", say)
    # What one of them had no time for is no part of the comparison.
    read = windows[: len(after)]
    tokens = sum(len(window) - 1 for window in read)
    return Measured(
        perplexity=Perplexity(
            before=_perplexity(before[: len(read)], tokens),
            after=_perplexity(after, tokens),
            tokens=tokens,
            window=job.window,
            text=str(text) if job.text else "the text that comes with llmtop",
            cut_by_time=len(read) < len(windows),
            dtype=job.dtype,
            seconds=time.monotonic() - started,
        )
    )


def _perplexity(nats: list[float], tokens: int) -> float:
    try:
        return math.exp(sum(nats) / tokens)
    except OverflowError:
        return math.inf


def _end_id(source: Source) -> int:
    """No end of text is measured: any will do for a tokenizer that has none."""
    found = source.config.get("eos_token_id")
    return found if isinstance(found, int) else 0


def _load(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=dtype, local_files_only=True, trust_remote_code=False
    )
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


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


@torch.inference_mode()
def _nats(model: Any, windows: list[list[int]], seconds: float, what: str, say: Say) -> list[float]:
    """Of each window, as far as time reaches: summed negative logarithms of what each token was given."""
    found: list[float] = []
    begun, tokens = time.monotonic(), 0
    device = next(model.parameters()).device
    for window in windows:
        if found and time.monotonic() - begun > seconds:
            break
        ids = torch.tensor([window], device=device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        found.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")))
        tokens += len(window) - 1
        say(Working(doing=f"perplexity {what}", done=tokens, total=0))
    return found

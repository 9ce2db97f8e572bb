"""Perplexity of a model before and after it was packed, on the same tokens of a held-out text."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
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
    windows = _windows(text, tokenizer, job.window)
    before, read, cut = _nats(model, windows, job.seconds, "before", say)
    if not before.tokens:
        raise UsageError(f"{text}: holds no text to measure on", fix="give a longer one: --text FILE")
    made = Path(job.made)
    if Target(form=job.form).library == "gguf":
        from llmtop.trainer.worker.packing.unpacking import load_gguf

        load_gguf(model, source, Target(form=job.form).kind, made)
    else:
        del model
        gc.collect()
        model = _load_packed(made)
    # Both see the same windows: what the first had no time for is no part of the comparison.
    after, _, late = _nats(model, iter(read), math.inf if not cut else 2 * job.seconds, "after", say)
    if late or after.tokens != before.tokens:
        raise LlmtopError(
            "the packed model took more than twice as long as the source did for the same text",
            fix="give it more time: --seconds",
        )
    return Measured(
        perplexity=Perplexity(
            before=before.perplexity,
            after=after.perplexity,
            tokens=before.tokens,
            window=job.window,
            text=str(text) if job.text else "the text that comes with llmtop",
            cut_by_time=cut,
            dtype=job.dtype,
            seconds=time.monotonic() - started,
        )
    )


class _Nats:
    """Summed negative logarithms of what the model gave each token that came."""

    def __init__(self) -> None:
        self.total, self.tokens = 0.0, 0

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.total / self.tokens)
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
def _nats(
    model: Any, windows: Iterator[list[int]], seconds: float, what: str, say: Say
) -> tuple[_Nats, list[list[int]], bool]:
    """(the sum, the windows that were read, whether time ran out before the text did)."""
    nats, read, begun = _Nats(), list[list[int]](), time.monotonic()
    device = next(model.parameters()).device
    for window in windows:
        if read and time.monotonic() - begun > seconds:
            return nats, read, True
        ids = torch.tensor([window], device=device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        nats.total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        nats.tokens += len(window) - 1
        read.append(window)
        say(Working(doing=f"perplexity {what}", done=nats.tokens, total=0))
    return nats, read, False

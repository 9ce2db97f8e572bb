"""Loads the libraries of a run ahead of time, without touching CUDA: a context does not survive a fork."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable

from msgspec import Struct

from llmtop.trainer.worker.forking import cuda_touched

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch._inductor",
    "deepspeed",
    "deepspeed.ops.adam",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep",
    "transformers",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.gemma2.modeling_gemma2",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.phi3.modeling_phi3",
    "accelerate",
    "peft",
    "flash_attn",
    "liger_kernel.transformers",
    "bitsandbytes",
    "llmtop.trainer.worker.session",
)
"""In the order of loading; what is not installed is passed over."""
PRELOAD_SECONDS = 60.0
"""After this long what is loaded is enough."""
_SHOWN_SECONDS = 0.5


class Preloaded(Struct, frozen=True, kw_only=True):
    touched: str = ""
    """The module that touched CUDA, which ended the loading."""
    words: str
    """What it took, and what is left to the ranks."""


def preload(
    leave: frozenset[str], seconds: float = PRELOAD_SECONDS, clock: Callable[[], float] = time.monotonic
) -> Preloaded:
    """Import everything but `leave`, as far as the time goes."""
    began = clock()
    took: list[str] = []
    left: list[str] = []
    touched = ""
    for name in PRELOADED:
        if _left(name, leave) or importlib.util.find_spec(name.partition(".")[0]) is None:
            continue
        if clock() - began > seconds:
            left.append(name)
            continue
        since = clock()
        try:
            importlib.import_module(name)
        except ImportError as error:
            # A rank that needs it will say the same, in its own log.
            sys.stderr.write(f"{name} is not preloaded: {error}\n")
        if clock() - since >= _SHOWN_SECONDS:
            took.append(f"{name} {clock() - since:.1f} s")
        if how := cuda_touched():
            touched = name
            took.append(f"then {how} by {name}")
            break
    words = f"{clock() - began:.1f} s ({', '.join(took)})"
    if leave or left:
        words += f", left to the ranks: {', '.join([*sorted(leave), *left])}"
    return Preloaded(touched=touched, words=words)


def _left(name: str, leave: frozenset[str]) -> bool:
    return any(name == left or name.startswith(f"{left}.") for left in leave)

"""How the modules of a Hugging Face model are recomputed in the backward pass."""

from __future__ import annotations

import functools
from typing import Any


def recomputes(module: Any) -> bool:
    """Whether this very module is one whose forward runs again."""
    return bool(getattr(module, "gradient_checkpointing", False))


def is_reentrant(module: Any) -> bool:
    """Whether its checkpoint is of the reentrant kind, which runs the whole forward again.

    By what transformers leaves on the module (5.24, `modeling_utils.py:_set_gradient_checkpointing`).
    """
    function = getattr(module, "_gradient_checkpointing_func", None)
    return isinstance(function, functools.partial) and bool(function.keywords.get("use_reentrant", False))

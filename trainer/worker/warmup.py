"""Loads what the first training step of any model would load into the process."""

from __future__ import annotations

import torch
from torch.nn import functional


def warm_up_math(dtype: torch.dtype) -> None:
    """Take one training step of a toy, so that code and buffers of the math libraries are resident.

    They belong to the runtime's baseline; otherwise the first real step would seem to hold them.
    """
    heads, width = 4, 64
    embedding = torch.nn.Embedding(2 * width, width, dtype=dtype)
    linear = torch.nn.Linear(width, width, dtype=dtype)
    optimizer = torch.optim.AdamW([*embedding.parameters(), *linear.parameters()])
    ids = torch.zeros(1, width, dtype=torch.long)
    query = linear(embedding(ids)).view(1, width, heads, -1).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    hidden = functional.silu(mixed.transpose(1, 2).reshape(1, width, width))
    logits = hidden @ embedding.weight.t()
    loss = functional.cross_entropy(logits.view(width, -1).float(), ids.view(-1))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()

"""What all ranks must know of each other while a state is saved or loaded: who cannot go on, and sums."""

from __future__ import annotations

import torch
import torch.distributed

_REASON_BYTES = 1024


def first_problem(problem: str | None, device: torch.device) -> str | None:
    """Collective. The problem of the first rank that has one, the same on every rank; None when none has."""
    words = (problem or "").encode()[:_REASON_BYTES]
    mine = torch.zeros(_REASON_BYTES, dtype=torch.uint8)
    mine[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8) if words else mine[:0]
    mine = mine.to(device)
    everyone = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyone, mine)
    told = (bytes(one.tolist()).rstrip(b"\0").decode(errors="ignore") for one in everyone)
    return next((text for text in told if text), None)


def sum_over_ranks(value: int, device: torch.device) -> int:
    """Collective."""
    total = torch.tensor([value], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(total)
    return int(total.item())

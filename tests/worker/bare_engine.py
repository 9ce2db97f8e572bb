"""An engine as DeepSpeed makes the smallest, for tests of the probes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def bare_engine(module: torch.nn.Module) -> Any:
    """As DeepSpeed at stage 0 in fp32: the optimizer is torch's own."""
    optimizer = torch.optim.AdamW(module.parameters())
    return SimpleNamespace(module=module, optimizer=optimizer, basic_optimizer=optimizer)

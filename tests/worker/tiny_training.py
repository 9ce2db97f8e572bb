"""A training that is small, but has what a language model has: embedding, blocks, head, a wide loss."""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from llmtop.profiler.probes.stepreading import StepReading
from llmtop.profiler.probes.training import TrainingProbes


class Shape(Struct, frozen=True, kw_only=True):
    vocab: int = 50
    hidden: int = 16
    batch: int = 4
    length: int = 8
    blocks: int = 3

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def weight_bytes(self) -> int:
        """Of all weights, in fp32."""
        return 4 * (2 * self.vocab * self.hidden + self.blocks * self.hidden * self.hidden)


class Tiny(torch.nn.Module):
    def __init__(self, shape: Shape, checkpointed: str | None) -> None:
        super().__init__()
        self.shape = shape
        self.checkpointed = checkpointed
        self.embedding = torch.nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(shape.blocks)
        )
        self.head = torch.nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = self._block(block, hidden)
        logits = self.head(hidden)
        loss: torch.Tensor = functional.cross_entropy(logits.view(-1, self.shape.vocab), input_ids.view(-1))
        return loss

    def _block(self, block: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        def run(value: torch.Tensor) -> torch.Tensor:
            return torch.tanh(block(torch.sigmoid(value)))

        if self.checkpointed is None:
            return run(hidden)
        made: torch.Tensor = checkpoint(run, hidden, use_reentrant=self.checkpointed == "reentrant")
        return made


def token_ids(shape: Shape, device: torch.device) -> torch.Tensor:
    return torch.randint(shape.vocab, (shape.batch, shape.length), device=device)


def train_step(probes: TrainingProbes, engine: Any, step: int, device: torch.device) -> StepReading:
    """A step of `engine.module`, a `Tiny`, inside the probes as the loop has them."""
    probes.begin_step(step)
    with probes.phase("data", last=True):
        ids = token_ids(engine.module.shape, device)
    with probes.phase("forward", last=True):
        loss = engine.module(input_ids=ids)
    with probes.phase("backward", last=True):
        loss.backward()
    del loss
    with probes.phase("optimizer", last=True):
        engine.basic_optimizer.step()
        engine.basic_optimizer.zero_grad()
    return probes.finish_step()

"""What a run's GPUs have drawn: joules since it began, and joules a token over its steps.

Devices give a running total, read once in a few seconds. Each reading is set against the tokens that were
trained at its time, so a figure per token leaves out what start-up took.
"""

from __future__ import annotations

from msgspec import Struct, field
from msgspec.structs import replace

from llmtop.profiler.record.events import HardwareSampled, StepFinished


class EnergyUse(Struct, frozen=True, kw_only=True):
    joules: dict[int, float] = field(default_factory=dict)
    """Device index to what it drew since its first sample of this run."""
    newest: dict[int, float] = field(default_factory=dict)
    """Device index to the newest running total."""
    tokens: int = 0
    """Trained so far."""
    began_joules: float | None = None
    """Of all devices, at the first new reading after the first step."""
    began_tokens: int = 0
    at_tokens: int = 0
    """Trained when the newest reading came."""

    @property
    def total_joules(self) -> float | None:
        """Of all devices since the run began; None where no device tells."""
        return sum(self.joules.values()) if self.joules else None

    @property
    def joules_per_token(self) -> float | None:
        """Over the steps between the first reading after the first step and the newest."""
        total = self.total_joules
        tokens = self.at_tokens - self.began_tokens
        if total is None or self.began_joules is None or tokens <= 0:
            return None
        return (total - self.began_joules) / tokens

    def with_step(self, step: StepFinished) -> EnergyUse:
        """A step of rank 0, which counts the tokens of all ranks."""
        tokens = step.tokens + (step.left_out.tokens if step.left_out is not None else 0)
        return replace(self, tokens=self.tokens + tokens) if tokens else self


def add_energy(use: EnergyUse, sample: HardwareSampled) -> EnergyUse:
    """The same object where no device gives a new total."""
    totals = {d.index: d.energy_joules for d in sample.devices if d.energy_joules is not None}
    if all(use.newest.get(index) == total for index, total in totals.items()):
        # Readings on the slow clock are repeated in between.
        return use
    joules = dict(use.joules)
    for index, total in totals.items():
        before = use.newest.get(index, total)
        # A total that went backwards began anew: the driver was loaded again.
        joules[index] = joules.get(index, 0.0) + max(0.0, total - before)
    use = replace(use, joules=joules, newest={**use.newest, **totals}, at_tokens=use.tokens)
    if use.began_joules is None and use.tokens:
        use = replace(use, began_joules=use.total_joules, began_tokens=use.tokens)
    return use

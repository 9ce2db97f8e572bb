"""The figures of a run as named numbers over its steps: what every mirror is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from llmtop.profiler.record.eventbase import rank_of
from llmtop.profiler.record.events import AnyEvent, HardwareSampled, MemoryClassified, StepFinished

_DEVICE = (
    *("memory_used_bytes", "utilization_percent", "power_watts", "temperature_celsius"),
    *("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second"),
    *("pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second"),
)


class Row(Struct, frozen=True, kw_only=True):
    """Numbers that belong together."""

    step: int
    wall: float
    values: dict[str, float]


class Rows:
    """Events in, rows out; the hardware's stand at the newest step."""

    def __init__(self) -> None:
        self.step = 0
        """The newest of rank 0."""

    def of(self, events: Iterable[AnyEvent]) -> Iterator[Row]:
        for event in events:
            values = self._values(event)
            if values:
                yield Row(step=self.step, wall=event.t, values=values)

    def _values(self, event: AnyEvent) -> dict[str, float]:
        if isinstance(event, StepFinished) and rank_of(event.src) == 0:
            self.step = event.step
            return _known(_step_values(event))
        if isinstance(event, HardwareSampled):
            return _known(_sample_values(event))
        if isinstance(event, MemoryClassified) and rank_of(event.src) == 0:
            return {f"memory/{event.moment}/{name}": float(size) for name, size in event.components.items()}
        return {}


def _known(values: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    return {name: float(value) for name, value in values if value is not None}


def _step_values(event: StepFinished) -> Iterator[tuple[str, float | None]]:
    yield "train/loss", event.loss
    yield "train/learning_rate", event.learning_rate
    yield "train/grad_norm", event.grad_norm
    yield "train/loss_scale", event.loss_scale
    yield "speed/step_seconds", event.step_seconds
    told = event.tokens and event.step_seconds > 0
    yield "speed/tokens_per_second", event.tokens / event.step_seconds if told else None
    for phase, seconds in event.phase_seconds.items():
        yield f"phase/{phase}_seconds", seconds
    peaks = [m.peak_bytes for m in event.phase_memory.values() if m.peak_bytes is not None]
    yield "memory/peak_bytes", max(peaks, default=None)


def _sample_values(event: HardwareSampled) -> Iterator[tuple[str, float | None]]:
    for device in event.devices:
        for name in _DEVICE:
            yield f"gpu{device.index}/{name}", getattr(device, name)
    yield "host/cpu_percent", event.host.cpu_percent
    for process in event.processes:
        yield f"rank{process.rank}/rss_bytes", process.rss_bytes

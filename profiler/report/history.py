"""What the plots of a report show and no state keeps: every step and sample of the record, as envelopes.

Two figures are on the axis of steps (loss, learning rate), the others on that of time, in seconds since the
first event, so that memory, phases and links can be seen one below the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter

from msgspec import Struct

from llmtop.profiler.record.deviceevents import DeviceSample
from llmtop.profiler.record.eventbase import rank_of
from llmtop.profiler.record.events import AnyEvent, HardwareSampled, StepFinished
from llmtop.profiler.record.feed import FreshStarts, LateLine, RunStream
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.report.envelope import Envelope, EnvelopeBuilder

DEVICE_FIGURES = (
    *(
        "memory_used_bytes",
        "utilization_percent",
        "power_watts",
        "sm_active_percent",
        "tensor_active_percent",
    ),
    *("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second"),
    *("pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second"),
)
_device_values = attrgetter(*DEVICE_FIGURES)
EACH_DEVICE = 8
"""More devices, or ranks, than so many are drawn as one band from the least to the largest."""
ALL = -1
"""In place of a number: all of them together."""


class History(Struct, frozen=True, kw_only=True):
    steps: dict[str, Envelope]
    """By figure, over the number of the step; of rank 0."""
    phases: dict[str, Envelope]
    """Phase to its seconds, over time; of rank 0."""
    devices: dict[str, dict[int, Envelope]]
    """By figure and NVML index (or `ALL`), over time; only what any device told."""
    processes: dict[int, Envelope]
    """Rank (or `ALL`) to the resident set of its process tree, over time."""
    host_bytes: Envelope
    """In use on the machine, over time."""
    cpu_percent: Envelope
    began: float | None
    """Wall clock at which the axis of time is zero."""


class HistoryBuilder:
    """Is given every event of a run, in the order of time."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._steps: defaultdict[str, EnvelopeBuilder] = defaultdict(EnvelopeBuilder)
        self._phases: defaultdict[str, EnvelopeBuilder] = defaultdict(EnvelopeBuilder)
        self._devices: dict[int, tuple[EnvelopeBuilder, ...]] = {}
        """By NVML index, in the order of `DEVICE_FIGURES`."""
        self._processes: defaultdict[int, EnvelopeBuilder] = defaultdict(EnvelopeBuilder)
        self._host, self._cpu = EnvelopeBuilder(), EnvelopeBuilder()

    def add(self, events: Iterable[AnyEvent]) -> None:
        for event in events:
            if self._began is None:
                self._began = event.t
            if isinstance(event, StepFinished):
                if rank_of(event.src) == 0:
                    self._add_step(event, event.t - self._began)
            elif isinstance(event, HardwareSampled):
                self._add_sample(event, event.t - self._began)

    def _add_step(self, event: StepFinished, at: float) -> None:
        step = float(event.step)
        self._steps["loss"].add(step, event.loss)
        self._steps["learning_rate"].add(step, event.learning_rate)
        self._steps["grad_norm"].add(step, event.grad_norm)
        if event.profiled:
            return  # its times are not those of a step
        self._steps["step_seconds"].add(step, event.step_seconds)
        for phase, seconds in event.phase_seconds.items():
            self._phases[phase].add(at, seconds)

    def _add_sample(self, event: HardwareSampled, at: float) -> None:
        apart = len(event.devices) <= EACH_DEVICE
        for device in event.devices:
            self._add_device(device, device.index if apart else ALL, at)
        apart = len(event.processes) <= EACH_DEVICE
        for process in event.processes:
            self._processes[process.rank if apart else ALL].add(at, process.rss_bytes)
        host = event.host
        self._host.add(at, host.memory_in_use_bytes)
        self._cpu.add(at, host.cpu_percent)

    def _add_device(self, device: DeviceSample, number: int, at: float) -> None:
        builders = self._devices.get(number)
        if builders is None:
            builders = self._devices[number] = tuple(EnvelopeBuilder() for _ in DEVICE_FIGURES)
        for builder, value in zip(builders, _device_values(device), strict=True):
            if value is not None:
                builder.add(at, value)

    def freeze(self) -> History:
        devices: dict[str, dict[int, Envelope]] = {}
        for number, builders in sorted(self._devices.items()):
            for figure, builder in zip(DEVICE_FIGURES, builders, strict=True):
                envelope = builder.freeze()
                if envelope.points:
                    devices.setdefault(figure, {})[number] = envelope
        return History(
            steps={name: builder.freeze() for name, builder in self._steps.items()},
            phases={name: builder.freeze() for name, builder in self._phases.items()},
            devices=devices,
            processes={number: builder.freeze() for number, builder in sorted(self._processes.items())},
            host_bytes=self._host.freeze(),
            cpu_percent=self._cpu.freeze(),
            began=self._began,
        )


def read_history(run: RunDir) -> History:
    """From the whole record as it is now. Raises LlmtopError where it cannot be read to its end."""
    fresh_starts = FreshStarts(run)
    while True:
        builder = HistoryBuilder()
        try:
            for batch in RunStream(run).batches():
                builder.add(batch)
        except LateLine:
            # It was thinned meanwhile: what is left of it is read from its beginning.
            fresh_starts.one_more()
            continue
        return builder.freeze()

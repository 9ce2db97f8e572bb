"""A run's metrics as tables: a row a step and rank, a row a sample and device, process or host.

CSV with one head line; a value that is not known is empty. Times are seconds since the epoch, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from llmtop.profiler.record.eventbase import rank_of
from llmtop.profiler.record.events import UNREAD_STEPS, AnyEvent, HardwareSampled, StepFinished
from llmtop.profiler.record.stepevents import BETWEEN

PHASES = ("data", "forward", "backward", "optimizer")
_TIMED = ("data", BETWEEN, *PHASES[1:])
"""What of a step is measured in time: memory is read at the borders of phases alone."""
_STEP = (
    *("step", "t", "loss", "learning_rate", "grad_norm", "loss_scale", "skipped", "tokens", "micro_batch"),
    *("grad_accum", "step_seconds", "profiled", "memory_every"),
)
_MEMORY = ("allocated_bytes", "peak_bytes", "reserved_bytes")
_DEVICE = (
    *("memory_used_bytes", "memory_total_bytes", "own_memory_bytes", "utilization_percent", "power_watts"),
    *("temperature_celsius", "sm_clock_hz", "memory_clock_hz", "sm_active_percent", "sm_occupancy_percent"),
    *("tensor_active_percent", "dram_active_percent", "nvlink_tx_bytes_per_second"),
    *("nvlink_rx_bytes_per_second", "pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second", "energy_joules"),
    *("ecc_corrected", "ecc_uncorrected", "pcie_generation", "pcie_width"),
)
_HOST = (
    *("memory_total_bytes", "memory_available_bytes", "cgroup_limit_bytes", "cgroup_used_bytes"),
    *("swap_used_bytes", "cpu_percent", "disk_read_bytes_per_second", "disk_write_bytes_per_second"),
    *("nvme_read_bytes_per_second", "nvme_write_bytes_per_second", "network_receive_bytes_per_second"),
    *("network_send_bytes_per_second", "cpu_limit_cores", "cpu_throttled_percent"),
)
_PROCESS = ("rss_bytes", "pss_bytes", "cpu_percent", "cpu_wait_percent")
_TEXT = frozenset({"skipped", "profiled"})
_WHOLE = frozenset(
    {"rank", "step", "device", "tokens", "micro_batch", "grad_accum", "memory_every"}
    | {"ecc_corrected", "ecc_uncorrected", "pcie_generation", "pcie_width"}
)


class Table(Struct, frozen=True, kw_only=True):
    name: str
    columns: tuple[str, ...]

    def kinds(self) -> dict[str, str]:
        """Column to `bool`, `int64` or `float64`: what a typed table of it has."""
        return {column: _kind(column) for column in self.columns}


STEPS = Table(
    name="steps",
    columns=(
        "rank",
        *_STEP,
        *(f"{phase}_seconds" for phase in _TIMED),
        *(f"{phase}_{kind}" for phase in PHASES for kind in _MEMORY),
        *(f"unread_steps_{kind}" for kind in _MEMORY[1:]),
    ),
)
DEVICES = Table(name="devices", columns=("t", "device", *_DEVICE))
HOSTS = Table(name="host", columns=("t", *_HOST))
PROCESSES = Table(name="processes", columns=("t", "rank", *_PROCESS))
TABLES = (STEPS, DEVICES, HOSTS, PROCESSES)

_step_values = attrgetter(*_STEP)
_device_values = attrgetter("index", *_DEVICE)
_host_values = attrgetter(*_HOST)
_process_values = attrgetter("rank", *_PROCESS)
_memory_values = attrgetter(*_MEMORY)
_NO_MEMORY = (None,) * len(_MEMORY)


class TableWriter:
    """Writes the tables into a folder while it is given the events of a run."""

    def __init__(self, folder: Path) -> None:
        self.paths = {table.name: folder / f"{table.name}.csv" for table in TABLES}
        self._open = ExitStack()
        self._write: dict[str, Callable[[bytes], int]] = {}
        for table in TABLES:
            file = self._open.enter_context(self.paths[table.name].open("wb", buffering=1 << 20))
            file.write(",".join(table.columns).encode() + b"\n")
            self._write[table.name] = file.write

    def add(self, events: Iterable[AnyEvent]) -> None:
        """Raises OSError where the disk is full."""
        steps: list[tuple[Any, ...]] = []
        samples: list[HardwareSampled] = []
        for event in events:
            if isinstance(event, StepFinished):
                steps.append(_step_row(event))
            elif isinstance(event, HardwareSampled):
                samples.append(event)
        self._rows(STEPS, steps)
        self._rows(DEVICES, [(s.t, *_device_values(device)) for s in samples for device in s.devices])
        self._rows(HOSTS, [(sample.t, *_host_values(sample.host)) for sample in samples])
        self._rows(PROCESSES, [(s.t, *_process_values(process)) for s in samples for process in s.processes])

    def _rows(self, table: Table, rows: list[tuple[Any, ...]]) -> None:
        if rows:
            self._write[table.name](csv_lines(rows))

    def close(self) -> None:
        self._open.close()


def csv_lines(rows: list[tuple[Any, ...]]) -> bytes:
    """Rows of numbers, switches and what is not known: JSON without its brackets and nulls is CSV.

    The encoder writes floats several times as fast as Python's own `csv` does. Not for text, which may hold
    what is replaced here.
    """
    lines = msgspec.json.encode(rows)
    return lines[2:-2].replace(b"],[", b"\n").replace(b"null", b"") + b"\n"


def _step_row(event: StepFinished) -> tuple[Any, ...]:
    seconds, memory = event.phase_seconds, event.phase_memory
    row = (rank_of(event.src), *_step_values(event), *map(seconds.get, _TIMED))
    if not memory:
        return row + _NO_MEMORY * len(PHASES) + _NO_MEMORY[1:]
    for phase in PHASES:
        known = memory.get(phase)
        row += _NO_MEMORY if known is None else _memory_values(known)
    unread = memory.get(UNREAD_STEPS)
    return row + (_NO_MEMORY if unread is None else _memory_values(unread))[1:]


def _kind(column: str) -> str:
    if column in _TEXT:
        return "bool"
    return "int64" if column in _WHOLE or (column.endswith("_bytes")) else "float64"

"""What one machine was measured to reach: the small file of `llmtop calibrate`, and who may use it.

The file lies in `$XDG_CACHE_HOME/llmtop/calibration/`, one for each kind of device, model and precision, and
`llmtop plan` takes it for the same. Nothing here imports torch: `profiler/probes/calibrate.py` measures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.foreign import read_json
from llmtop.presets.paths import cache_dir
from llmtop.presets.spec import MachineFigures, RunSpec
from llmtop.profiler.cost.shape import Role, tensors
from llmtop.profiler.units import counted

SCHEMA_VERSION = 1


class Work(Struct, frozen=True, kw_only=True):
    """What is to be measured, at the shapes of one run."""

    on_cpu: bool
    precision: str
    threads: int | None
    """Of a rank on the CPU kind; None: as torch has it."""
    micro_batch: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention: str
    vocab_size: int
    matrices: tuple[tuple[int, int], ...]
    """(out, in) of the matrices that a token is multiplied with in a block, and of the head."""
    trained: int
    """Weights of the optimizer step, as far as they are worth measuring."""


class Measured(Struct, frozen=True, kw_only=True):
    """What the measuring process answers."""

    figures: MachineFigures
    versions: dict[str, str]
    device: str
    scatter: dict[str, float] = {}
    """Figure to the middle of its passes over the best of them."""


class Calibration(Struct, frozen=True, kw_only=True):
    """The file."""

    schema_version: int = SCHEMA_VERSION
    gpu: str
    """Name of the preset that it is for."""
    processor: str
    date: str
    versions: dict[str, str]
    took_seconds: float
    work: Work
    figures: MachineFigures
    scatter: dict[str, float] = {}
    """Figure to the middle of its passes over the best of them: 1 where nothing disturbed."""
    load_average: float | None = None
    """Of the minute before."""
    cores: int | None = None
    """Of the machine, which the load average is of."""


SCATTERED = 1.5
"""Passes of an idle machine lie closer together."""


def doubts(found: Calibration) -> Iterator[str]:
    """Why its figures may be too low: in words, none where nothing seems to have disturbed."""
    load, cores = found.load_average, found.cores
    if load is not None and cores is not None and load > cores:
        yield f"the machine was busy: a load average of {load:.1f} on {counted(cores, 'core')}"
    figure, most = max(found.scatter.items(), key=lambda one: one[1], default=("", 1.0))
    if most > SCATTERED:
        yield f"passes of one measurement lay apart: of {figure} the middle one took {most:.1f} x the best"


MOST_TRAINED = 50_000_000


def work_of(spec: RunSpec, threads: int | None) -> Work:
    """What to measure for a run."""
    options, model = spec.options, spec.model
    roles = (Role.ATTENTION, Role.MLP, Role.EXPERT)
    groups = [group for group in tensors(model) if group.role in roles and len(group.shape) == 2]
    matrices = dict.fromkeys((group.shape[0], group.shape[1]) for group in groups)
    head = (model.vocab_size, model.embedding_dim or model.hidden_size)
    return Work(
        on_cpu=spec.on_cpu,
        precision=options.precision,
        threads=threads,
        micro_batch=options.micro_batch,
        seq_len=options.seq_len,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        attention=options.attention,
        vocab_size=model.vocab_size,
        matrices=(*matrices, head),
        trained=min(MOST_TRAINED, sum(group.total for group in tensors(model))),
    )


def calibrations_dir() -> Path:
    """Where the files lie, whether there are any or not."""
    return cache_dir() / "calibration"


def path_for(spec: RunSpec) -> Path:
    words = (spec.gpu.name, spec.model.name, spec.options.precision)
    return calibrations_dir() / ("-".join(re.sub(r"[^\w.]+", "_", word) for word in words) + ".json")


def save(spec: RunSpec, calibration: Calibration) -> Path:
    from llmtop.profiler.record.wholefile import write_atomic  # a plan saves none

    path = path_for(spec)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.format(msgspec.json.encode(calibration)) + b"\n")
    return path


def find(spec: RunSpec) -> Calibration | None:
    """The calibration that is for this run's device, model and precision; None where there is none.

    A file of another version or a broken one counts as none: it is made anew in a minute.
    """
    path = path_for(spec)
    try:
        found = read_json(path, Calibration)
    except (OSError, msgspec.DecodeError):
        return None
    if found.schema_version != SCHEMA_VERSION or found.gpu != spec.gpu.name:
        return None
    # A CPU's figures are of this very processor; a GPU's name says what it is, wherever it is.
    return None if spec.on_cpu and found.processor != machine_name() else found


def machine_name() -> str:
    import platform  # a plan for a GPU asks for none of it

    from llmtop.profiler.hardware.processor import processor_name

    return f"{processor_name()}, {os.cpu_count()} CPUs, {platform.machine()}"


def calibrated(spec: RunSpec, found: Calibration | None) -> RunSpec:
    """The same run on the machine as measured."""
    if found is None:
        return spec
    return replace(spec, gpu=replace(spec.gpu, measured=found.figures))


def with_calibration(spec: RunSpec) -> RunSpec:
    """The same run on the machine as `llmtop calibrate` has measured it, if it has."""
    return calibrated(spec, find(spec))

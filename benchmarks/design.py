"""Which configurations to measure: a seeded space-filling design plus one-factor sweeps, refusals left out.

Points come from a Halton sequence with seeded digit permutations (Faure and Lemieux, 2009), one prime for
each axis; a point is a level of every axis. Cells that the rules refuse or whose predicted upper bound does
not fit are redrawn, and points go on being drawn until every level of every axis appears often enough.
The same seed always gives the same cells.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from benchmarks.cells import Planned, plan
from benchmarks.rows import Cell, key_of
from llmtop.presets.errors import LlmtopError
from llmtop.presets.resolve import Machine

FITS_SHARE = 0.9
"""Of the device's memory that a cell's upper bound may take."""
MAX_DRAWS = 60_000
FLASH_HEAD_DIM = 128
"""The widest heads of the FlashAttention wheels that the results were made with, which have bf16 only and
no soft caps."""


class Level(Struct, frozen=True, kw_only=True):
    """One value of an axis: a name and the options that it stands for."""

    name: str
    options: dict[str, Any]


class Axis(Struct, frozen=True, kw_only=True):
    name: str
    levels: tuple[Level, ...]
    """A level that is listed twice is drawn twice as often."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(level.name for level in self.levels))

    def level(self, name: str) -> Level:
        return next(level for level in self.levels if level.name == name)


class Space(Struct, frozen=True, kw_only=True):
    """What is drawn from, and what a cell may take."""

    gpu: str
    host_bytes: int
    """Host memory that a cell may need."""
    max_step_seconds: float
    axes: tuple[Axis, ...]
    bases: dict[int, tuple[dict[str, str], ...]]
    """By GPUs the points from which one axis at a time is swept, axis to level; an axis that is left out has
    its first level."""
    cells: dict[int, int]
    """GPUs to the number of cells drawn for them, sweeps not counted."""
    least_of_level: int
    """How often each level appears in a design at least."""


class Drawn(Struct, frozen=True, kw_only=True):
    """A cell of the design with the levels that it was made of."""

    cell: Cell
    levels: dict[str, str]
    origin: str
    """`space` or the name of the axis that is swept."""


def _options(name: str, values: Sequence[Any]) -> Axis:
    """An axis of one option."""
    return Axis(name=name, levels=tuple(Level(name=str(value), options={name: value}) for value in values))


def _named(axis: str, **levels: dict[str, Any]) -> Axis:
    return Axis(name=axis, levels=tuple(Level(name=name, options=given) for name, given in levels.items()))


def _zero(**keys: Any) -> dict[str, Any]:
    return {"deepspeed": {"zero_optimization": keys}}


_BUCKETS = _named(
    "buckets",
    default={},
    small=_zero(reduce_bucket_size=50_000_000, allgather_bucket_size=50_000_000),
    large=_zero(reduce_bucket_size=1_000_000_000, allgather_bucket_size=1_000_000_000),
    overlap=_zero(overlap_comm=True, reduce_bucket_size=200_000_000),
)
_CHECKPOINTING = _named(
    "checkpointing",
    none={},
    all={"gradient_checkpointing": True},
    every_2nd={"gradient_checkpointing": True, "checkpointing_every": 2},
    reentrant={"gradient_checkpointing": True, "checkpointing_reentrant": True},
)
_LIGER = _named(
    "liger",
    off={},
    all={"liger": True},
    rms_norm={"liger": True, "liger_kernels": "rms_norm"},
    rope={"liger": True, "liger_kernels": "rope"},
    glu={"liger": True, "liger_kernels": "glu"},
    cross_entropy={"liger": True, "liger_kernels": "cross_entropy"},
    fused_linear_cross_entropy={"liger": True, "liger_kernels": "fused_linear_cross_entropy"},
)
_MODELS = (
    "smollm2-135m",
    "smollm2-360m",
    "gpt2",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "pythia-1b",
    "tinyllama-1.1b",
    "llama-3.2-1b",
    "qwen2.5-1.5b",
    "qwen3-1.7b",
    "smollm2-1.7b",
    "gemma-2-2b",
    "qwen2.5-3b",
    "llama-3.2-3b",
    "qwen3-4b",
    "mistral-7b",
    "qwen2.5-7b",
    "llama-3.1-8b",
    "qwen3-8b",
)
"""0.1B to 8B, seven families, tied and untied heads, vocabularies of 32,000 to 256,000."""
_MODELS_FROM_1B = _MODELS[_MODELS.index("pythia-1b") :]

_OPTIMIZERS = ("adamw", "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit")

H200 = Space(
    gpu="h200",
    host_bytes=90_000_000_000,
    max_step_seconds=2.5,
    axes=(
        _options("model", _MODELS),
        _options("zero", (0, 1, 2, 3)),
        _options("seq_len", (2048, 256, 512, 1024, 4096, 8192, 16384, 32768)),
        _options("micro_batch", (1, 2, 4, 8, 16, 32)),
        _options("precision", ("bf16", "bf16", "bf16", "fp16", "fp32")),
        _options("attention", ("sdpa", "flash_attention_2", "flash_attention_2", "eager")),
        Axis(name="liger", levels=_LIGER.levels[:2] * 3 + _LIGER.levels[2:]),
        _CHECKPOINTING,
        Axis(
            name="offload",
            levels=(
                *(Level(name="none", options={}),) * 4,
                Level(name="optimizer", options={"offload_optimizer": "cpu"}),
                Level(name="both", options={"offload_optimizer": "cpu", "offload_param": "cpu"}),
            ),
        ),
        _options("optimizer", _OPTIMIZERS),
        Axis(
            name="adapter",
            levels=(
                *(Level(name="full", options={}),) * 4,
                Level(name="lora", options={"lora_rank": 16}),
                Level(name="int8", options={"lora_rank": 16, "quantization": "int8"}),
                Level(name="nf4", options={"lora_rank": 16, "quantization": "nf4"}),
            ),
        ),
        _options("grad_accum", (1, 2, 4)),
        _BUCKETS,
    ),
    bases={
        1: (
            {"model": "llama-3.2-1b", "zero": "2", "micro_batch": "4"},
            {"model": "qwen3-0.6b", "zero": "1", "attention": "flash_attention_2", "liger": "all"},
        ),
        2: ({"model": "llama-3.2-1b", "zero": "3", "attention": "flash_attention_2"},),
    },
    cells={1: 80, 2: 60},
    least_of_level=4,
)
CPU = Space(
    gpu="cpu",
    host_bytes=4_000_000_000,
    max_step_seconds=60.0,
    axes=(
        _options("model", ("tiny-llama-cpu",)),
        _options("zero", (2, 0, 1, 3)),
        _options("seq_len", (32, 64, 128)),
        _options("micro_batch", (1, 2, 4)),
        _options("attention", ("sdpa", "eager")),
        _CHECKPOINTING,
        _options("optimizer", ("adamw", "adamw_torch")),
        _options("grad_accum", (1, 2)),
    ),
    bases={1: ({},), 2: ({},), 4: (), 8: ()},
    cells={1: 8, 2: 6, 4: 4, 8: 4},
    least_of_level=2,
)
MANY = Space(
    gpu="h200",
    host_bytes=400_000_000_000,
    max_step_seconds=6.0,
    axes=(
        # Soft caps and heads of 256 go with neither attention below.
        _options("model", [name for name in _MODELS_FROM_1B if name != "gemma-2-2b"]),
        _options("zero", (3, 1, 2, 3)),
        _options("seq_len", (2048, 1024, 4096, 8192)),
        _options("micro_batch", (1, 2, 4)),
        _options("precision", ("bf16", "bf16", "bf16", "fp16")),
        _options("attention", ("sdpa", "flash_attention_2")),
        Axis(name="liger", levels=_LIGER.levels[:2]),
        Axis(name="checkpointing", levels=_CHECKPOINTING.levels[:2]),
        Axis(
            name="offload",
            levels=(
                *(Level(name="none", options={}),) * 3,
                Level(name="optimizer", options={"offload_optimizer": "cpu"}),
                Level(name="both", options={"offload_optimizer": "cpu", "offload_param": "cpu"}),
            ),
        ),
        _options("optimizer", ("adamw", "adamw", "adamw_torch", "adamw_8bit")),
        Axis(
            name="adapter",
            levels=(
                *(Level(name="full", options={}),) * 5,
                Level(name="lora", options={"lora_rank": 16}),
                Level(name="int8", options={"lora_rank": 16, "quantization": "int8"}),
            ),
        ),
        _options("grad_accum", (1, 2)),
        Axis(name="buckets", levels=(*(_BUCKETS.levels[0],) * 2, _BUCKETS.levels[-1])),
    ),
    bases={4: (), 8: ()},
    cells={4: 15, 8: 15},
    least_of_level=1,
)
"""Four and eight GPUs, 1B to 8B. Of a box with several GPUs there is little time, so nothing is swept."""
LARGE = Space(
    gpu="h200",
    host_bytes=400_000_000_000,
    max_step_seconds=20.0,
    axes=(
        _options("model", ("qwen2.5-32b", "llama-3.1-70b")),
        _options("zero", (3,)),
        _options("seq_len", (2048, 4096)),
        _options("micro_batch", (1,)),
        _options("attention", ("flash_attention_2",)),
        Axis(name="liger", levels=_LIGER.levels[1:2]),
        Axis(name="checkpointing", levels=_CHECKPOINTING.levels[1:2]),
        _named(
            "trained",
            lora={"lora_rank": 16},
            full_8bit={"optimizer": "adamw_8bit"},
            nf4={"lora_rank": 16, "quantization": "nf4"},
        ),
    ),
    bases={4: (), 8: ()},
    cells={4: 3, 8: 3},
    least_of_level=1,
)
"""32B and 70B on as many, as they still fit: adapters, packed weights under them, 8-bit optimizer states."""
SPACES = {"h200": H200, "cpu": CPU}
COUNTS = (1, 2, 4, 8)
"""Of GPUs that there is a design for."""
MANY_COUNTS = (4, 8)


def designed(seed: int, gpus: int, *, on_cpu: bool = False) -> list[Drawn]:
    """The cells for so many GPUs; on more than two the large models come last, for they take longest.

    Four and eight GPUs get points of their own, not the same ones twice.
    """
    if on_cpu:
        return design(seed, gpus, CPU)
    if gpus in MANY_COUNTS:
        return [drawn for space in (MANY, LARGE) for drawn in design(seed + gpus, gpus, space)]
    return design(seed, gpus)


def design(seed: int, gpus: int, space: Space = H200) -> list[Drawn]:
    """The cells for so many GPUs: space-filling ones and sweeps in turn, so that any beginning holds both."""
    machine = Machine(gpu=space.gpu, gpus=gpus, host_memory_bytes=None)
    accept = partial(_accepted, space=space, machine=machine)
    swept = _distinct(drawn for drawn in sweeps(gpus, space) if accept(drawn))
    random.Random(seed).shuffle(swept)
    spread = _spread(seed, gpus, space, swept, accept)
    return _interleaved(spread, swept)


def sweeps(gpus: int, space: Space) -> Iterator[Drawn]:
    """From each base point one axis at a time through all its levels."""
    for base in space.bases[gpus]:
        levels = {axis.name: axis.level(base.get(axis.name, axis.levels[0].name)) for axis in space.axes}
        for axis in space.axes:
            for name in axis.names:
                yield _drawn({**levels, axis.name: axis.level(name)}, gpus, axis.name)


def counts(cells: Sequence[Drawn]) -> Counter[tuple[str, str]]:
    """How often each level of each axis appears."""
    return Counter((axis, level) for drawn in cells for axis, level in drawn.levels.items())


def halton(index: int, base: int, digits: Sequence[int]) -> float:
    """The radical inverse of `index` with its digits replaced by `digits`."""
    value, scale = 0.0, 1.0
    while index > 0:
        index, digit = divmod(index, base)
        scale /= base
        value += digits[digit] * scale
    return value


def fits(planned: Planned, space: Space) -> bool:
    """Whether a cell's upper bound leaves a tenth of the device free, and the host and the clock bear it."""
    prediction = planned.prediction
    if prediction.host_bytes > space.host_bytes or (prediction.step_seconds or 0.0) > space.max_step_seconds:
        return False
    if prediction.device_memory_bytes is None or prediction.needed_bytes is None:
        return True
    return prediction.needed_bytes <= FITS_SHARE * prediction.device_memory_bytes


def _spread(
    seed: int, gpus: int, space: Space, swept: Sequence[Drawn], accept: Callable[[Drawn], bool]
) -> list[Drawn]:
    """Points of the sequence that can run: so many, and then those alone that hold a rare level."""
    found: list[Drawn] = []
    known = {key_of(drawn.cell) for drawn in swept}
    seen: Counter[tuple[str, str]] = Counter()
    wanted = [(axis.name, name) for axis in space.axes for name in axis.names]
    for levels in _points(seed, space.axes):
        drawn = _drawn(levels, gpus, "space")
        rare = any(seen[key] < space.least_of_level for key in drawn.levels.items())
        if (len(found) < space.cells[gpus] or rare) and key_of(drawn.cell) not in known and accept(drawn):
            found.append(drawn)
            known.add(key_of(drawn.cell))
            seen.update(drawn.levels.items())
            if len(found) >= space.cells[gpus] and all(seen[key] >= space.least_of_level for key in wanted):
                break
    return found


def _points(seed: int, axes: Sequence[Axis]) -> Iterator[dict[str, Level]]:
    shuffle = random.Random(seed)
    primes = _primes(len(axes))
    permuted = [[0, *shuffle.sample(range(1, prime), prime - 1)] for prime in primes]
    for index in range(1, MAX_DRAWS):
        yield {
            axis.name: axis.levels[int(halton(index, prime, digits) * len(axis.levels))]
            for axis, prime, digits in zip(axes, primes, permuted, strict=True)
        }


def _primes(count: int) -> list[int]:
    found: list[int] = []
    number = 2
    while len(found) < count:
        if all(number % prime for prime in found):
            found.append(number)
        number += 1
    return found


def _drawn(levels: dict[str, Level], gpus: int, origin: str) -> Drawn:
    cell: Cell = {"gpus": gpus}
    for level in levels.values():
        cell |= level.options
    return Drawn(cell=cell, levels={axis: level.name for axis, level in levels.items()}, origin=origin)


def _accepted(drawn: Drawn, *, space: Space, machine: Machine) -> bool:
    cell = drawn.cell
    if _idle(cell):
        return False
    try:
        planned = plan({**cell, "gpu": space.gpu}, machine, name="design", closely=False)
    except LlmtopError:
        return False
    model = planned.spec.model
    if str(cell.get("attention")).startswith("flash") and (
        cell.get("precision", "bf16") != "bf16"
        or model.head_dim > FLASH_HEAD_DIM
        or model.attention_softcap is not None
    ):
        return False
    return fits(planned, space)


def _idle(cell: Cell) -> bool:
    """Whether an option of the cell changes nothing, so that another cell is the same run."""
    return cell.get("zero") == 0 and "deepspeed" in cell


def _distinct(cells: Iterator[Drawn]) -> list[Drawn]:
    return list({key_of(drawn.cell): drawn for drawn in cells}.values())


def _interleaved(first: Sequence[Drawn], second: Sequence[Drawn]) -> list[Drawn]:
    """In proportion: both lists end together."""
    places = [((i + 0.5) / len(first), drawn) for i, drawn in enumerate(first)]
    places += [((i + 0.5) / len(second), drawn) for i, drawn in enumerate(second)]
    return [drawn for _, drawn in sorted(places, key=lambda place: place[0])]

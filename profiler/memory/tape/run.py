"""The first steps of a run on a simulated device: what its allocator holds at most, and what is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.sizes import Sizes, sizes_of
from llmtop.profiler.memory.states import cublas_workspace
from llmtop.profiler.memory.tape.build import Builder, engine_plan, is_covered
from llmtop.profiler.memory.tape.machine import Machine
from llmtop.profiler.memory.tape.plan import Plan
from llmtop.profiler.memory.tape.stage3 import Stage3

if TYPE_CHECKING:
    from llmtop.profiler.memory.tape.engine import Engine

STEPS = 2
"""The optimizer's moments come in the first step; what they push aside is asked for again in the second."""
MICRO_BATCHES = 2
"""Of a step, at most: from the second on each leaves the allocator as it found it."""


class Taped(Struct, frozen=True, kw_only=True):
    """What came of a simulated run, in bytes."""

    peak_allocated_bytes: int
    """From the first step on."""
    peak_reserved_bytes: int
    """From the start of the run on."""
    allocated_then_bytes: int
    """When most was reserved."""
    reserved_of_streams: dict[int, int]
    """Of `peak_reserved_bytes`, by stream."""
    missing_bytes: int
    """What the device could not give, at most: above zero the run ends out of memory."""


def taped(spec: RunSpec, room_bytes: int | None) -> Taped | None:
    """Simulate the run; None where the order of its allocations is not known."""
    if not is_covered(spec):
        return None
    sizes = sizes_of(spec)
    # ZeRO-1 and -2 give the first rank the embedding and the last the head; stage 3 shares every tensor.
    ranks = {0, sizes.ranks - 1} if sizes.stage in (1, 2) else {0}
    runs = [run_tape(spec, sizes, machine_of(spec, room_bytes), rank) for rank in sorted(ranks)]
    fullest = max(runs, key=lambda run: run.peak_reserved_bytes)
    peak = max(run.peak_allocated_bytes for run in runs)
    missing = max(run.missing_bytes for run in runs)
    return replace(fullest, peak_allocated_bytes=peak, missing_bytes=missing)


def machine_of(spec: RunSpec, room_bytes: int | None = None) -> Machine:
    return Machine(room_bytes, cublas_workspace(spec) // 2)


def _engine_of(machine: Machine, plan: Plan) -> Engine | Stage3:
    if plan.stage == 3:
        return Stage3(machine, plan)
    from llmtop.profiler.memory.tape.engine import Engine  # the larger of the two: loaded where it is needed

    return Engine(machine, plan)


def run_tape(
    spec: RunSpec,
    sizes: Sizes,
    machine: Machine,
    rank: int = 0,
    steps: int = STEPS,
    *,
    watched: bool = True,
) -> Taped:
    """One rank's run on a fresh machine, from the model's first weight on; `watched`: with the probes of a
    run's first two steps."""
    plan = engine_plan(spec, sizes, rank)
    engine = _engine_of(machine, plan)
    engine.start()
    model = Builder(spec, sizes, machine, engine, watched=watched).model()
    machine.peak_allocated_bytes = 0
    micro_batches = min(MICRO_BATCHES, spec.options.grad_accum)
    for _ in range(steps):
        for index in range(micro_batches):
            engine.begin(index, boundary=index == micro_batches - 1)
            model.run()
            engine.end_backward()
        engine.step()
    allocated, streams = machine.at_peak
    return Taped(
        peak_allocated_bytes=machine.peak_allocated_bytes,
        peak_reserved_bytes=machine.peak_reserved_bytes,
        allocated_then_bytes=allocated,
        reserved_of_streams=streams,
        missing_bytes=machine.missing_bytes,
    )

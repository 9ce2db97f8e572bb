"""One rank from joining the others to its last event: builds everything, runs the loop, says how it ended."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
from msgspec import Struct

from llmtop.presets.spec import RunOptions, RunSpec
from llmtop.profiler.probes.allocator import Peaks
from llmtop.profiler.probes.baseline import baseline, device_used_bytes
from llmtop.profiler.probes.due import is_classified
from llmtop.profiler.probes.heap import read_heap
from llmtop.profiler.probes.inmodules import model_built
from llmtop.profiler.probes.kernels import profiled_step
from llmtop.profiler.probes.outside import OutsideProbe, first_collective, make_context
from llmtop.profiler.probes.training import TrainingProbes
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import ModelBuilt, RankFinished
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.restagefolder import restage_folders
from llmtop.trainer.ops import ops_of
from llmtop.trainer.statefile import newest_in
from llmtop.trainer.worker import checkpoint
from llmtop.trainer.worker.build import DTYPES, build_model, import_model_code
from llmtop.trainer.worker.callbacks import (
    Callback,
    Checkpointer,
    Emit,
    Hold,
    StepLog,
    StepReporter,
    write_line,
)
from llmtop.trainer.worker.data import Batches
from llmtop.trainer.worker.forking import let_torchao_in
from llmtop.trainer.worker.heal import Healing, can_heal
from llmtop.trainer.worker.leaves import check_leaves, has_leaves
from llmtop.trainer.worker.live import LiveChanges
from llmtop.trainer.worker.livesettings import restore_options
from llmtop.trainer.worker.loop import Live, Loop, LoopEnd, Probes
from llmtop.trainer.worker.malloc import EXACT_STEPS, return_freed_memory
from llmtop.trainer.worker.opbuild import build_ops
from llmtop.trainer.worker.optimizer import client_optimizer, client_schedule, parameter_groups
from llmtop.trainer.worker.place import Place
from llmtop.trainer.worker.process_group import join_process_group, leave_process_group
from llmtop.trainer.worker.profiling import Profiling
from llmtop.trainer.worker.ranges import enter_ranges_if_heard
from llmtop.trainer.worker.stages import StageLog
from llmtop.trainer.worker.state.apart import require_same
from llmtop.trainer.worker.stopping import StopRequest
from llmtop.trainer.worker.tokens import load_tokens
from llmtop.trainer.worker.vote import Vote
from llmtop.trainer.worker.warmup import warm_up_math

_VERSIONED = (
    "torch",
    "deepspeed",
    "transformers",
    "peft",
    "bitsandbytes",
    "liger-kernel",
    "flash-attn",
    "torchao",
)


def import_libraries(spec: RunSpec, *, off_device: bool = False) -> None:
    """Everything that is loaded whatever the model's size; `off_device` but for what takes device memory."""
    quiet_libraries()
    let_torchao_in(spec.options.qat != "none" and not off_device)
    import_model_code(spec, off_device=off_device)
    if spec.on_cpu:
        warm_up_math(DTYPES[spec.options.precision])


def quiet_libraries() -> None:
    """Lines that come with each collective or each matrix product and that nobody can act on."""
    warnings.filterwarnings("ignore", message=r".*is deprecated\. Please use", category=FutureWarning)
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    # Of torchao, which transformers and peft import wherever it is installed: kernels for other devices.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    logging.getLogger("torchao").setLevel(logging.ERROR)


def train(run: RunDir, place: Place, events: EventWriter, stages: StageLog, stop: StopRequest) -> None:
    """Everything between the imports and the end of the process."""
    on_cpu = run.spec().on_cpu
    device_used_before = None if on_cpu else device_used_bytes(place.local_rank)
    outside = None if on_cpu else OutsideProbe(place.local_rank, events.write)
    with stages("process_group"):
        if outside is not None:
            # Each reading shows what was added since the one before: first the context alone.
            outside.measure("untouched")
            make_context(torch.device("cuda", place.local_rank))
            outside.measure("context")
        device = join_process_group(place, on_cpu=on_cpu)
        if outside is not None:
            first_collective(device)
            outside.measure("process_group")
    train_in_group(
        run,
        place,
        device,
        events,
        stages,
        stop,
        device_used_before_bytes=device_used_before,
        outside=outside,
    )
    leave_process_group(device)


def train_in_group(
    run: RunDir,
    place: Place,
    device: torch.device,
    events: EventWriter,
    stages: StageLog,
    stop: StopRequest,
    *,
    device_used_before_bytes: int | None = None,
    outside: OutsideProbe | None = None,
) -> None:
    """One run from its data to its last step, in a process group that is up."""
    spec = run.spec()
    built = _build(
        run, place, device, events, stages, device_used_before_bytes=device_used_before_bytes, outside=outside
    )
    probes = make_probes(
        built.engine,
        spec,
        place,
        device,
        events.write,
        first_step=built.first_step,
        heap_free_before_bytes=built.heap_free_before_bytes,
        outside=outside,
    )
    checkpointer = Checkpointer(
        built.engine,
        built.batches,
        spec,
        run.checkpoints_dir,
        events.write,
        before_saving=probes.settle,
        resumed_step=built.first_step - 1,
    )
    profiling = Profiling(
        run,
        probes,
        built.engine,
        rank=place.rank,
        device=device,
        kernel_step=_kernel_step(spec.options, built.first_step),
        first_step=built.first_step,
        emit=events.write,
    )
    live = LiveChanges(
        run,
        built.engine,
        built.batches,
        probes=probes,
        checkpointer=checkpointer,
        emit=events.write,
        profiling=profiling,
    )
    healing = make_healing(built.engine, built.batches, spec, place, live, probes, stages, events.write)
    loop = make_loop(
        built.engine,
        built.batches,
        spec,
        place,
        device,
        probes=profiling,
        healing=healing,
        callbacks=(make_report(spec, place, events.hold), checkpointer),
        stages=stages,
        stop=stop,
        exact_steps=EXACT_STEPS if spec.on_cpu and return_freed_memory() else 0,
        live=live,
    )
    end = loop.run(built.first_step, spec.options.steps)
    if outside is not None:
        outside.measure("end")
    profiling.close()
    probes.close()
    if healing is not None:
        healing.close()
    events.write(_finished(end, probes.peaks()))


class _Built(Struct, frozen=True, kw_only=True):
    """What the loop starts from."""

    engine: Any
    batches: Batches
    first_step: int
    heap_free_before_bytes: int


def _build(
    run: RunDir,
    place: Place,
    device: torch.device,
    events: EventWriter,
    stages: StageLog,
    *,
    device_used_before_bytes: int | None,
    outside: OutsideProbe | None,
) -> _Built:
    """Data, ops, model and engine, each a stage of its own; resumed from the newest checkpoint."""
    spec, deepspeed_config = run.spec(), run.deepspeed_config()
    with stages("data"):
        batches = make_batches(run, spec, place)
    ops = ops_of(deepspeed_config)
    if ops:
        # Before the model: at stage 3 with parameters on NVMe its shards are written as it is made.
        with stages("op_build"):
            build_ops(ops, events.write)
    heap = read_heap() if spec.on_cpu else None
    events.write(
        baseline(
            local_rank=place.local_rank, device_used_before_bytes=device_used_before_bytes, on_cpu=spec.on_cpu
        )
    )
    with stages("weights" if spec.weights_dir else "model"):
        model = build_model(spec, deepspeed_config, device, events.write)
    with stages("partition"):
        engine = build_engine(model, spec, deepspeed_config)
        # Alike weights came from one seed; dropout must differ between ranks. A checkpoint has its own.
        torch.manual_seed(spec.options.seed + 1 + place.rank)
        first_step = 1 + _resume(run, engine, batches, spec, events.write)
    if outside is not None:
        outside.measure("engine")
    events.write(describe(engine, model))
    return _Built(
        engine=engine,
        batches=batches,
        first_step=first_step,
        heap_free_before_bytes=heap.free_bytes if heap else 0,
    )


def build_engine(model: torch.nn.Module, spec: RunSpec, deepspeed_config: dict[str, Any]) -> Any:
    options = spec.options
    enter_ranges_if_heard()
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model, options.weight_decay),
        optimizer=client_optimizer(options, deepspeed_config),
        lr_scheduler=client_schedule(options, deepspeed_config),
        config=deepspeed_config,
        dist_init_required=False,
    )
    if has_leaves(deepspeed_config):
        check_leaves(model)
    return engine


def describe(engine: Any, model: Any) -> ModelBuilt:
    """What was really built, which may differ from what was asked for."""
    return model_built(model, engine.basic_optimizer, engine.optimizer, _VERSIONED)


def make_batches(run: RunDir, spec: RunSpec, place: Place) -> Batches:
    options = spec.options
    return Batches(
        load_tokens(run, spec, place),
        seq_len=options.seq_len,
        micro_batch=options.micro_batch,
        place=place,
        seed=options.seed,
        where=options.data,
    )


def make_probes(
    engine: Any,
    spec: RunSpec,
    place: Place,
    device: torch.device,
    emit: Emit,
    *,
    first_step: int,
    heap_free_before_bytes: int = 0,
    outside: OutsideProbe | None = None,
) -> TrainingProbes:
    """What watches a rank that begins at `first_step`."""
    return TrainingProbes(
        engine,
        device=device,
        vocab_size=spec.model.vocab_size,
        classify_every=spec.options.classify_every,
        heap_free_before_bytes=heap_free_before_bytes,
        kernel_step=_kernel_step(spec.options, first_step),
        records_kernels=place.rank == 0,
        outside=outside,
        emit=emit,
    )


def make_report(
    spec: RunSpec, place: Place, hold: Hold, write: Callable[[str], None] = write_line
) -> Callback:
    """What tells of each step: an event, and now and then a line of the log."""
    return StepReporter(spec, place.rank, hold, StepLog(spec.options.steps, place.rank, write))


def make_loop(
    engine: Any,
    batches: Batches,
    spec: RunSpec,
    place: Place,
    device: torch.device,
    *,
    probes: Probes,
    callbacks: Sequence[Callback],
    stages: StageLog,
    stop: StopRequest,
    exact_steps: int = 0,
    live: Live | None = None,
    healing: Healing | None = None,
) -> Loop:
    return Loop(
        engine,
        batches,
        device=device,
        world_size=place.world_size,
        grad_accum=spec.options.grad_accum,
        probes=probes,
        callbacks=callbacks,
        stages=stages,
        stop=stop,
        exact_steps=exact_steps,
        live=live,
        healing=healing,
    )


def make_healing(
    engine: Any,
    batches: Batches,
    spec: RunSpec,
    place: Place,
    live: LiveChanges,
    probes: TrainingProbes,
    stages: StageLog,
    emit: Emit,
) -> Healing | None:
    """Collective; None where the run does not ask for it, or its steps cannot be taken back."""
    if not spec.options.heal or not can_heal(engine):
        return None
    vote = Vote(place.world_size)
    vote.watch(deepspeed.comm.comm.cdb)
    return Healing(engine, batches, live, probes, stages, vote, emit)


def _kernel_step(options: RunOptions, first_step: int) -> int | None:
    every = options.classify_every
    return profiled_step(
        options.kernel_profile_step,
        first_step,
        options.steps,
        lambda step: is_classified(step, every, first_step),
    )


def _finished(end: LoopEnd, peaks: Peaks) -> RankFinished:
    return RankFinished(
        reason=end.reason,
        last_step=end.last_step,
        peak_allocated_bytes=peaks.allocated_bytes,
        peak_reserved_bytes=peaks.reserved_bytes,
        peak_rss_bytes=peaks.rss_bytes,
    )


def _resume(run: RunDir, engine: Any, batches: Batches, spec: RunSpec, emit: Emit) -> int:
    """The step that a relaunch goes on from; 0 for a new run."""
    # One that was saved for a relaunch lies elsewhere.
    found = newest_in((run.checkpoints_dir, *restage_folders(run)))
    require_same(found[0].step if found is not None else None, torch.device(engine.device))
    if found is None:
        return 0
    progress, folder = found
    emit(checkpoint.load(engine, folder, progress, only_trainable=spec.options.lora_rank > 0))
    restore_options(engine, spec.options)
    batches.resume(progress.position)
    return progress.step

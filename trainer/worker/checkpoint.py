"""Checkpoints: the training state of all ranks in one folder, readable at any ZeRO stage and world size.

A folder `step-N` counts when its marker is there, which is written last; it gets its name only then. The one
before it stays until that. `llmtop.trainer.statefile` says what is in a folder.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.checkpointevents import CheckpointLoaded, CheckpointRefused, CheckpointSaved
from llmtop.profiler.record.wholefile import sync_folder, write_atomic
from llmtop.trainer.room import why_no_room
from llmtop.trainer.statefile import INDEX, MARKER, Progress, StateIndex, read_index, read_progress
from llmtop.trainer.worker.state.apart import domains_of, hand_out
from llmtop.trainer.worker.state.consent import first_problem, sum_over_ranks
from llmtop.trainer.worker.state.finding import Stored
from llmtop.trainer.worker.state.layout import StateRefused, layout_of
from llmtop.trainer.worker.state.loading import Filler
from llmtop.trainer.worker.state.names import named_parameters
from llmtop.trainer.worker.state.saving import Share, make_index, shard_name, share_of, write_share

_PARTIAL = ".partial"
_OLD = ".old"


def save(
    engine: Any, folder: Path, progress: Progress, *, only_trainable: bool, durable: bool = True
) -> CheckpointSaved | CheckpointRefused:
    """Collective, at a step's end. Writes `folder/step-N`, or says why not, and the training can go on.

    `only_trainable` leaves out weights that are not trained. `durable` waits until the drive has the files,
    which a checkpoint that is read right away does not need.
    """
    began = time.perf_counter()
    device = torch.device(engine.device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    share, problem = _plan(engine, only_trainable=only_trainable)
    problem = first_problem(problem, device)
    if problem is None:
        assert share is not None
        problem = _save_share(engine, share, folder, progress, only_trainable=only_trainable, durable=durable)
    if problem is not None:
        return CheckpointRefused(step=progress.step, why=problem)
    path = folder / f"step-{progress.step}"
    size = sum(file.stat().st_size for file in path.iterdir())
    return CheckpointSaved(
        step=progress.step, path=str(path), size_bytes=size, seconds=time.perf_counter() - began
    )


def leaves_base_out(spec: RunSpec) -> bool:
    """Whether a checkpoint of this run needs no weights but the adapters'.

    Random weights are drawn otherwise at ZeRO-3 than below it, so they are kept; packed ones are drawn whole.
    """
    options = spec.options
    made_again = spec.weights_dir is not None or options.quantization != "none"
    return options.lora_rank > 0 and made_again


def load(engine: Any, folder: Path, progress: Progress, *, only_trainable: bool) -> CheckpointLoaded:
    """Collective, on a fresh engine of any ZeRO stage and world size; reads what each rank holds of it.

    `only_trainable` takes a state that leaves out weights that are not trained; they must be those it had.

    Raises LlmtopError on every rank when the state is not of this model or cannot be read.
    """
    began = time.perf_counter()
    device = torch.device(engine.device)
    named = named_parameters(engine.module)
    stored: Stored | None = None
    filler: Filler | None = None
    try:
        try:
            path = _path_of(folder, progress.step)
            stored = Stored(path, read_index(path), named)
            filler = Filler(engine, stored, layout_of(engine, named), named)
            filler.check(only_trainable=only_trainable)
            problem = None
        except (LlmtopError, OSError) as error:
            problem = error
        _agree(problem, device)
        assert stored is not None and filler is not None
        try:
            filler.fill()
        except (LlmtopError, OSError) as error:
            problem = error
        _agree(problem, device)
        filler.refresh()
        filled = filler.finish()
    finally:
        if stored is not None:
            stored.close()
    return CheckpointLoaded(
        step=progress.step,
        path=str(path),
        bytes_read=filled.bytes_read,
        seconds=time.perf_counter() - began,
        zero=stored.index.source.zero,
        world_size=stored.index.source.world_size,
        notes=filled.notes,
    )


def prune(folder: Path, keep: int, *, spare_step: int = 0) -> None:
    """Remove all complete checkpoints but the newest `keep`, and what a crash left of others. On one rank.

    The one of `spare_step` stays as well. Raises OSError for what cannot be removed.
    """
    complete = sorted(
        (progress.step, path)
        for path in folder.glob("step-*")
        if (progress := read_progress(path)) is not None
    )
    for step, path in complete[: max(0, len(complete) - keep)]:
        if step == spare_step:
            continue
        # Without its marker first, so that a removal that is cut off leaves nothing that counts.
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)
    _remove_partial(folder)


def _save_share(
    engine: Any, share: Share, folder: Path, progress: Progress, *, only_trainable: bool, durable: bool
) -> str | None:
    """Collective: from an empty folder to a checkpoint that counts. Why not, the same on every rank."""
    device, rank = torch.device(engine.device), int(engine.global_rank)
    partial = folder / f".step-{progress.step}{_PARTIAL}"
    try:
        domains = domains_of(folder, device)
    except OSError as error:
        return str(error)
    writes = domains.writes(rank)
    # What a crash left goes first: it may be what takes the room.
    problem = first_problem(_prepare(folder, partial) if writes else None, device)
    if problem is None:
        total = sum_over_ranks(share.size_bytes, device)
        problem = first_problem(why_no_room(folder, total), device)
    if problem is None:
        problem = first_problem(_write(share, partial, rank, durable=durable), device)
    shards = [(shard_name(one), one) for one in range(len(domains.of))]
    if problem is None and domains.apart:
        problem = first_problem(hand_out(partial, shards, domains, device, durable=durable), device)
    if problem is None:
        ended = _describe(engine, partial, progress, only_trainable=only_trainable) if rank == 0 else None
        problem = first_problem(ended, device)
    if problem is None and domains.apart:
        documents = [(INDEX, 0), (MARKER, 0)]
        problem = first_problem(hand_out(partial, documents, domains, device, durable=durable), device)
    if problem is None:
        problem = first_problem(
            _put_in_place(partial, progress.step, durable=durable) if writes else None, device
        )
    if problem is not None and writes:
        shutil.rmtree(partial, ignore_errors=True)
    return problem


def _plan(engine: Any, *, only_trainable: bool) -> tuple[Share | None, str | None]:
    try:
        return share_of(engine, only_trainable=only_trainable), None
    except StateRefused as error:
        return None, error.in_one_line


def _prepare(folder: Path, partial: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_partial(folder)
        partial.mkdir(mode=0o700)
    except OSError as error:
        return f"{partial}: {error.strerror or error}"
    return None


def _write(share: Share, partial: Path, rank: int, *, durable: bool) -> str | None:
    try:
        write_share(share, partial, rank, durable=durable)
    except OSError as error:
        return f"rank {rank} could not write {partial}: {error.strerror or error}"
    return None


def _describe(engine: Any, partial: Path, progress: Progress, *, only_trainable: bool) -> str | None:
    """On rank 0: index, then marker."""
    try:
        index = make_index(engine, partial, progress.step, only_trainable=only_trainable)
        write_atomic(partial / INDEX, msgspec.json.encode(index))
        files = {file.name: file.stat().st_size for file in partial.iterdir()}
        marker = msgspec.structs.replace(progress, files=files)
        write_atomic(partial / MARKER, msgspec.json.encode(marker))
    except OSError as error:
        return f"{partial}: {error.strerror or error}"
    except StateRefused as error:
        return error.in_one_line
    return None


def _put_in_place(partial: Path, step: int, *, durable: bool) -> str | None:
    """On one rank of each folder: the name by which the checkpoint is found."""
    path, old = partial.with_name(f"step-{step}"), partial.with_name(f"step-{step}{_OLD}")
    try:
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        partial.rename(path)
        if durable:
            # Until the drive has the name, nobody may be told of the checkpoint.
            sync_folder(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return None


def _agree(problem: LlmtopError | OSError | None, device: torch.device) -> None:
    """Collective. Raises on every rank when one has a problem: its own, or the first one's words."""
    told = first_problem(None if problem is None else _in_one_line(problem), device)
    if isinstance(problem, LlmtopError):
        raise problem
    if told is not None:
        raise LlmtopError("the checkpoint cannot be loaded", why=told) from problem


def _in_one_line(error: LlmtopError | OSError) -> str:
    return error.in_one_line if isinstance(error, LlmtopError) else str(error)


def _remove_partial(folder: Path) -> None:
    for path in folder.glob(f".step-*{_PARTIAL}"):
        shutil.rmtree(path)


def _path_of(folder: Path, step: int) -> Path:
    """Of two of one step, one was about to take the other's place: the new one, if it came so far."""
    path = folder / f"step-{step}"
    old = folder / f"step-{step}{_OLD}"
    return old if read_progress(path) is None and read_progress(old) is not None else path


def index_of(folder: Path, progress: Progress) -> StateIndex:
    """What a checkpoint holds."""
    return read_index(_path_of(folder, progress.step))

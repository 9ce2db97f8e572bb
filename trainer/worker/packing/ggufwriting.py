"""A GGUF file from a folder, tensor by tensor and piece by piece, with what each tensor lost on the way."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import IO, Any, NamedTuple

import gguf
import numpy
from numpy.typing import NDArray

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.quantized import TensorError
from llmtop.trainer.quantize.job import Packed, PackJob, Working
from llmtop.trainer.quantize.plan import Planned, plan_gguf
from llmtop.trainer.quantize.source import read_source
from llmtop.trainer.quantize.target import Target
from llmtop.trainer.worker.packing.ggufmetadata import add_metadata
from llmtop.trainer.worker.packing.peak import Peak
from llmtop.trainer.worker.packing.reading import Floats, pieces
from llmtop.trainer.worker.packing.saying import Say
from llmtop.trainer.worker.packing.vocabulary import add_vocabulary

_MOST_WORKERS = 4
_REPORT_SECONDS = 0.5


class _Piece(NamedTuple):
    packed: bytes
    lost: float
    """Summed squares of what changed."""
    held: float
    """Summed squares of the numbers."""
    finite: bool


def write_gguf(job: PackJob, say: Say) -> Packed:
    """Raises LlmtopError for a model or a tokenizer that cannot be written, and for numbers that are none."""
    started = time.monotonic()
    source = read_source(Path(job.source))
    plan = plan_gguf(source, Target(form=job.form).kind)
    writer = gguf.GGUFWriter(None, plan.arch)
    add_metadata(writer, source, plan)
    notes = (*plan.notes, *add_vocabulary(writer, source))
    for planned in plan.planned:
        writer.add_tensor_info(
            planned.name,
            planned.shape,
            numpy.dtype(numpy.float32),
            planned.size_bytes,
            gguf.GGMLQuantizationType[planned.kind],
        )
    with Peak() as peak, closing(writer):
        errors = _write(writer, Path(job.target), plan.planned, say)
    return Packed(
        tensor_bytes=plan.size_bytes,
        errors=tuple(sorted(errors, key=lambda error: -(error.relative_rms or 0.0))),
        peak_host_bytes=peak.bytes,
        seconds=time.monotonic() - started,
        notes=notes,
    )


def _write(
    writer: gguf.GGUFWriter, target: Path, planned: tuple[Planned, ...], say: Say
) -> list[TensorError]:
    """The whole file; it is on the drive when this returns."""
    writer.write_header_to_file(target)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file = writer.fout[0]
    errors = _write_tensors(file, writer, planned, say)
    file.flush()
    os.fsync(file.fileno())
    return errors


def _write_tensors(
    file: IO[bytes], writer: gguf.GGUFWriter, planned: tuple[Planned, ...], say: Say
) -> list[TensorError]:
    total, done, reported = sum(each.size_bytes for each in planned), 0, -math.inf
    errors = []
    workers = max(1, min(_MOST_WORKERS, len(os.sched_getaffinity(0))))
    writer.write_padding(file, file.tell())
    with ThreadPoolExecutor(workers) as pool:
        for each in planned:
            lost = held = 0.0
            begun = file.tell()
            for piece in _in_order(pool, workers, each):
                if not piece.finite:
                    raise _not_finite(each)
                file.write(piece.packed)
                lost, held = lost + piece.lost, held + piece.held
                if time.monotonic() - reported >= _REPORT_SECONDS:
                    reported = time.monotonic()
                    say(Working(doing="packing", done=done + file.tell() - begun, total=total))
            written = file.tell() - begun
            if written != each.size_bytes:
                raise ValueError(f"{each.name} has {written} bytes, not {each.size_bytes}")
            writer.write_padding(file, written)
            done += written
            if each.tensors:
                rms = math.sqrt(lost / held) if held else None
                errors.append(
                    TensorError(name=each.key, kind=each.kind, size_bytes=written, relative_rms=rms)
                )
    say(Working(doing="packing", done=done, total=total))
    return errors


def _in_order(pool: ThreadPoolExecutor, most: int, planned: Planned) -> Iterator[_Piece]:
    """As many pieces in the making as there are workers: numpy lets go of Python's lock as it computes."""
    waiting: deque[Future[_Piece]] = deque()
    for floats in _floats(planned):
        waiting.append(pool.submit(_pack, floats, planned))
        if len(waiting) > most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _floats(planned: Planned) -> Iterator[Floats]:
    if not planned.tensors:
        yield numpy.array(planned.values, numpy.float32).reshape(1, -1)
        return
    for tensor in planned.tensors:
        yield from pieces(tensor, planned.heads)


def _pack(floats: Floats, planned: Planned) -> _Piece:
    if planned.plus_one:
        floats = floats + numpy.float32(1)
    kind = gguf.GGMLQuantizationType[planned.kind]
    with numpy.errstate(all="ignore"):  # what is not finite is told below, by the tensor's name
        packed: NDArray[Any] = gguf.quantize(floats, kind)
        back = gguf.dequantize(packed, kind).reshape(floats.shape)
        change = back - floats
        return _Piece(
            packed.tobytes(),
            float(numpy.square(change).sum(dtype=numpy.float64)),
            float(numpy.square(floats).sum(dtype=numpy.float64)),
            bool(numpy.isfinite(back).all()),
        )


def _not_finite(planned: Planned) -> LlmtopError:
    key = planned.key or planned.name
    return LlmtopError(
        f"{key} holds numbers that {planned.kind} cannot",
        why="some are infinite, no numbers at all, or too large for 16-bit scales",
        fix="--to gguf:BF16 takes numbers of any size; where they are no numbers, the weights are broken",
    )

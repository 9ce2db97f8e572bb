"""A rank's file of flat tensors: plain safetensors, written and read in pieces by a few threads.

Nothing is ever held twice: what lies in host memory goes to the file as it is, what lies on a GPU passes
through one page-locked buffer for each thread; a reader touches only the ranges that it is asked for.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from llmtop.presets.errors import LlmtopError
from llmtop.presets.tensorfile import LENGTH_BYTES, BrokenWeights, Entry, read_header

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 32 << 20
_MOST_THREADS = 8

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def header_of(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header of a file of these tensors, and the byte at which each begins."""
    # Wide types first, so that each is aligned to its own width.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    begins: dict[str, int] = {}
    for name in order:
        tensor = tensors[name]
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        begins[name] = at
        at += tensor.nbytes
    words = json.dumps(entries, separators=(",", ":")).encode()
    words += b" " * (-len(words) % LENGTH_BYTES)
    head = len(words).to_bytes(LENGTH_BYTES, "little") + words
    return head, {name: begin + len(head) for name, begin in begins.items()}


def write_shard(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str], *, durable: bool
) -> int:
    """Bytes written. `durable` waits until the drive has them. Raises OSError when it cannot be written."""
    head, begins = header_of(tensors, metadata)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _write_all(descriptor, memoryview(head), 0)
        bounce = _Bounce()

        def write(chunk: torch.Tensor, at: int) -> None:
            _write_all(descriptor, _bytes(bounce.in_host_memory(chunk)), at)

        _in_threads(write, _chunks((tensors[name].detach().view(-1), at) for name, at in begins.items()))
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return len(head) + sum(tensor.nbytes for tensor in tensors.values())


class ShardWriter:
    """A file of tensors that are written one by one, so that only one of them need be in memory."""

    def __init__(self, path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        """`tensors` say names, types and shapes alone: they may be without memory ("meta")."""
        head, self._begins = header_of(tensors, metadata)
        self._unwritten = set(tensors)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _write_all(self._descriptor, memoryview(head), 0)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Raises OSError when it cannot be written."""
        self._unwritten.remove(name)
        if tensor.numel():
            _write_all(self._descriptor, _bytes(tensor.contiguous().view(-1)), self._begins[name])

    def close(self) -> None:
        """Waits until the drive has all of it."""
        try:
            if self._unwritten:
                raise ValueError(f"{sorted(self._unwritten)[0]} was never written")
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


class ShardReader:
    """One rank's file, open for reading ranges of its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            header = read_header(path)
        except BrokenWeights as error:
            raise LlmtopError(f"{path} is damaged", why=str(error)) from error
        self._entries, self._data_at, self.metadata = header.entries, header.data_at, header.metadata
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._descriptor)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def dtype(self, name: str) -> torch.dtype:
        dtype = self._entry(name).dtype
        if dtype not in DTYPES:
            raise LlmtopError(f"{self.path} is damaged", why=f"no state holds {dtype!r}, the type of {name}")
        return DTYPES[dtype]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor in host memory."""
        made = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.read_all([(name, 0, made.view(-1))])
        return made

    def read_all(self, ranges: Iterable[tuple[str, int, torch.Tensor]]) -> int:
        """Fill each flat target from the elements of a tensor from `start` on; bytes that were read."""
        bounce = _Bounce()
        total = 0
        jobs: list[tuple[torch.Tensor, int]] = []
        stored: dict[int, torch.dtype] = {}
        for name, start, target in ranges:
            dtype = self.dtype(name)
            width = dtype.itemsize
            first, end = self._entry(name).data_offsets
            if start < 0 or first + (start + target.numel()) * width > end:
                raise LlmtopError(f"{self.path} is damaged", why=f"{name} is shorter than the index says")
            for chunk, at in _chunks([(target, 0)], width):
                begin = self._data_at + first + start * width + at
                stored[len(jobs)] = dtype
                jobs.append((chunk, begin))
            total += target.numel() * width

        def read(number: int) -> None:
            chunk, at = jobs[number]
            dtype = stored[number]
            if chunk.device.type == "cpu" and chunk.dtype == dtype:
                self._fill(_bytes(chunk), at)
                return
            held = bounce.buffer(chunk.numel() * dtype.itemsize, chunk.device).view(dtype)
            self._fill(_bytes(held), at)
            chunk.copy_(held)

        _in_threads(read, [(number,) for number in range(len(jobs))])
        return total

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise LlmtopError(f"{self.path} is damaged", why=f"it has no {name}, which the index names")
        return self._entries[name]

    def _fill(self, target: memoryview, at: int) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:]], at + done)
            if count == 0:
                raise LlmtopError(f"{self.path} is damaged", why="it is shorter than its header says")
            done += count


class _Bounce:
    """A buffer for each thread, page-locked where it serves a GPU."""

    def __init__(self) -> None:
        self._local = threading.local()

    def buffer(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        held: torch.Tensor | None = getattr(self._local, "held", None)
        if held is None or held.numel() < size_bytes:
            held = self._local.held = _host_buffer(max(size_bytes, _CHUNK_BYTES), device)
        return held[:size_bytes]

    def in_host_memory(self, chunk: torch.Tensor) -> torch.Tensor:
        if chunk.device.type == "cpu":
            return chunk
        held = self.buffer(chunk.nbytes, chunk.device).view(chunk.dtype)
        held.copy_(chunk)
        return held


def _host_buffer(size_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            # The limit of locked memory is reached: slower, but a training does not end for it.
            logger.warning("no page-locked buffer for a checkpoint: copies go through plain memory")
    return torch.empty(size_bytes, dtype=torch.uint8)


def _chunks(
    tensors: Iterable[tuple[torch.Tensor, int]], width: int | None = None
) -> list[tuple[torch.Tensor, int]]:
    """Flat tensors in pieces of bounded size, each with the byte at which it lies."""
    pieces = []
    for tensor, at in tensors:
        bytes_each = width if width is not None else tensor.element_size()
        step = _CHUNK_BYTES // bytes_each
        for start in range(0, tensor.numel(), step):
            pieces.append((tensor[start : start + step], at + start * bytes_each))
    return pieces


def _in_threads(act: Callable[..., None], jobs: list[tuple[Any, ...]]) -> None:
    if len(jobs) <= 1:
        for job in jobs:
            act(*job)
        return
    # One alone is far from what memory or a drive can take.
    threads = max(2, min(_MOST_THREADS, len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(min(threads, len(jobs))) as pool:
        for done in [pool.submit(act, *job) for job in jobs]:
            done.result()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's memory itself."""
    held: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(held)


def _write_all(descriptor: int, content: memoryview, at: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], at + done)

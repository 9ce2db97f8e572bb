"""A folder that is not the same on all hosts: who shares it, and how the others get what is written into it.

Without a common file system every host keeps a whole copy of each state, so that any of them can be lost and
a relaunch reads locally. The files go through the ranks' own process group.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

import torch
import torch.distributed
from msgspec import Struct

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.wholefile import sync_folder
from llmtop.trainer.worker.state.consent import first_problem

_PART_BYTES = 16 << 20
_MARK = ".shared-by-"


class Domains(Struct, frozen=True):
    """Ranks that see the same folder form a domain, which is called by the lowest of them."""

    of: tuple[int, ...]
    """Rank to its domain."""

    @property
    def apart(self) -> bool:
        return len(set(self.of)) > 1

    def writes(self, rank: int) -> bool:
        """Whether this rank does for its domain what only one may do."""
        return self.of[rank] == rank


@cache
def domains_of(folder: Path, device: torch.device) -> Domains:
    """Collective when it is first asked of a folder, which is made where it is not there.

    Raises OSError on every rank where one cannot write there.
    """
    ranks = torch.distributed.get_world_size()
    if _is_one_host(ranks):
        return Domains((0,) * ranks)
    rank = torch.distributed.get_rank()
    token = torch.frombuffer(bytearray(secrets.token_bytes(8)), dtype=torch.uint8).to(device)
    torch.distributed.broadcast(token, 0)
    mark = f"{_MARK}{bytes(token.tolist()).hex()}-"
    own, problem = folder / f"{mark}{rank}", None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own.touch()
    except OSError as error:
        problem = f"rank {rank} cannot write {folder}: {error.strerror or error}"
    problem = first_problem(problem, device)
    if problem is not None:
        raise OSError(problem)
    lowest = min(int(path.name.removeprefix(mark)) for path in folder.glob(f"{mark}*"))
    seen = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    torch.distributed.all_gather(seen, torch.tensor([lowest], dtype=torch.int64, device=device))
    with suppress(FileNotFoundError):
        own.unlink()
    return Domains(tuple(int(one.item()) for one in seen))


def hand_out(
    folder: Path, files: Iterable[tuple[str, int]], domains: Domains, device: torch.device, *, durable: bool
) -> str | None:
    """Collective: files by name and the rank whose domain has them go to every other domain.

    Why one could not be read or written here; a rank that fails goes on taking part.
    """
    rank, problem = torch.distributed.get_rank(), None
    for name, owner in files:
        takes = domains.writes(rank) and domains.of[rank] != domains.of[owner]
        try:
            _pass_on(folder / name, owner, rank, device, takes=takes and problem is None, durable=durable)
        except OSError as error:
            could = "read" if rank == owner else "write"
            problem = f"rank {rank} could not {could} {folder / name}: {error.strerror or error}"
    return problem


def require_same(step: int | None, device: torch.device) -> None:
    """Collective: raise LlmtopError where the hosts would go on from different states."""
    ranks = torch.distributed.get_world_size()
    if _is_one_host(ranks):
        return
    seen = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    torch.distributed.all_gather(seen, torch.tensor([step or 0], dtype=torch.int64, device=device))
    steps = [int(one.item()) for one in seen]
    if len(set(steps)) > 1:
        first = {found: steps.index(found) for found in dict.fromkeys(steps)}
        told = ", ".join(f"{f'step {s}' if s else 'none'} where rank {rank} is" for s, rank in first.items())
        raise LlmtopError(
            "the hosts do not have the same checkpoint to go on from",
            why=f"the newest is {told}",
            fix="copy the newest folder checkpoints/step-N of the run to the hosts that have not got it",
        )


def _is_one_host(ranks: int) -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", str(ranks)) == str(ranks)


def _pass_on(path: Path, owner: int, rank: int, device: torch.device, *, takes: bool, durable: bool) -> None:
    """Collective. Whoever cannot read or write still takes part to the end, and raises OSError then."""
    source = Source(path) if rank == owner else None
    size = torch.tensor([source.size_bytes if source is not None else 0], dtype=torch.int64, device=device)
    torch.distributed.broadcast(size, owner)
    target = Target(path, durable=durable) if takes else None
    for at in range(0, int(size.item()), _PART_BYTES):
        count = min(_PART_BYTES, int(size.item()) - at)
        part = torch.empty(count, dtype=torch.uint8)
        if source is not None:
            part = torch.frombuffer(source.read(count), dtype=torch.uint8)
        part = part.to(device)
        torch.distributed.broadcast(part, owner)
        if target is not None:
            target.write(part)
    for one in (source, target):
        if one is not None:
            one.close()


class Source:
    """A file to be read whose problems come last; what cannot be read is zeros until then."""

    def __init__(self, path: Path) -> None:
        self._problem: OSError | None = None
        self._file: IO[bytes] | None = None
        self.size_bytes = 0
        try:
            self._file = path.open("rb", buffering=0)
            self.size_bytes = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            self._problem = error

    def read(self, count: int) -> bytearray:
        part, at = bytearray(count), 0
        try:
            while self._problem is None and self._file is not None and at < count:
                content = self._file.read(count - at)
                if not content:
                    raise OSError(errno.EIO, "it has become shorter")
                part[at : at + len(content)] = content
                at += len(content)
        except OSError as error:
            self._problem = error
        return part

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._problem is not None:
            raise self._problem


class Target:
    """A file to be written whose problems come last."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        self._path, self._durable = path, durable
        self._problem: OSError | None = None
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._problem = error

    def write(self, part: torch.Tensor) -> None:
        content: memoryview = part.cpu().numpy().data
        try:
            while content and self._problem is None:
                content = content[os.write(self._descriptor, content) :]
        except OSError as error:
            self._problem = error

    def close(self) -> None:
        if self._descriptor >= 0:
            try:
                if self._durable and self._problem is None:
                    os.fsync(self._descriptor)
                    sync_folder(self._path.parent)
            finally:
                os.close(self._descriptor)
        if self._problem is not None:
            raise self._problem

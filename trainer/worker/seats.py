"""Ranks that are forked instead of started: processes that wait to be told which rank they are."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from llmtop.trainer.pdeath import die_with_parent
from llmtop.trainer.supervisor.ranks import Ranks
from llmtop.trainer.worker.forking import end_after, restart_nvml

_PIECE_BYTES = 1 << 16


class Part(Struct, frozen=True, kw_only=True):
    """What a rank has to know that is started as a command otherwise."""

    run: str
    """The folder, last of the command's words."""
    environment: dict[str, str]
    log: str


class Seat:
    """A child of the supervisor with its libraries loaded. It ends with its parent."""

    def __init__(self) -> None:
        read, self._write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._write)
            end_after(partial(_sit, read))
        os.close(read)

    def take(self, part: Part) -> int:
        """From here on it is a rank like one that the supervisor starts; its pid."""
        with os.fdopen(self._write, "wb") as pipe:
            pipe.write(msgspec.json.encode(part) + b"\n")
        return self.pid


class SeatedRanks(Ranks):
    """The first ranks take the seats; later ones are started as ever."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        super().__init__()
        self._seats = list(seats)

    def _launch(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        if not self._seats:
            return super()._launch(command, environment, log)
        part = Part(run=command[-1], environment=dict(environment), log=str(log))
        return self._seats.pop(0).take(part)


def redirect(log: Path) -> None:
    """Standard output and error to a log, as a started process has them from the beginning."""
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((stream, 1), (stream, 2), (nothing, 0)):
        os.dup2(descriptor, target)
    os.close(stream)
    os.close(nothing)


def _sit(read: int) -> int:
    die_with_parent()
    told = b""
    # Not until the pipe's end: who sits down later has the writing side of earlier ones too.
    while not told.endswith(b"\n"):
        told += os.read(read, _PIECE_BYTES)
    os.close(read)
    _become_rank(msgspec.json.decode(told, type=Part))
    return 0


def _become_rank(part: Part) -> None:
    from llmtop.trainer.worker.__main__ import main

    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(part.environment)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    redirect(Path(part.log))
    restart_nvml()
    main([part.run])

"""What the lead tells the supervisor of a host to do: numbered lines of one file, each carried out once."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct

from llmtop.profiler.record.eventlog import ends_torn, write_line
from llmtop.profiler.record.events import RunEnd


class Order(Struct, frozen=True, kw_only=True, tag_field="do", omit_defaults=True):
    number: int = 0
    """Counted from 1 by the lead; filled in when it is written."""


class OfferPort(Order, frozen=True, kw_only=True, tag="offer_port"):
    """Of the first host: where its ranks can meet the others."""


class StartRanks(Order, frozen=True, kw_only=True, tag="start_ranks"):
    """All of this host, on a setting of the run."""

    setting: int
    master_address: str
    master_port: int
    standby: bool = False
    """They are made ready beside those that train."""


class TakeStandby(Order, frozen=True, kw_only=True, tag="take_standby"):
    """Those that stood by are the ranks from now on."""


class EndStandby(Order, frozen=True, kw_only=True, tag="end_standby"):
    pass


class SignalRanks(Order, frozen=True, kw_only=True, tag="signal_ranks"):
    signal: int


class KillRanks(Order, frozen=True, kw_only=True, tag="kill_ranks"):
    """And everything below the host's supervisor but what stands by."""


class TidyStates(Order, frozen=True, kw_only=True, tag="tidy_states"):
    """The states that were saved for a relaunch: they go, or become checkpoints."""

    keep: bool = False


class Leave(Order, frozen=True, kw_only=True, tag="leave"):
    """The run is over: nothing is to be left."""

    state: RunEnd
    reason: str
    fix: str = ""


AnyOrder: TypeAlias = (
    OfferPort | StartRanks | TakeStandby | EndStandby | SignalRanks | KillRanks | TidyStates | Leave
)


class OrderWriter:
    """The lead's, of one host."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._torn = ends_torn(self._descriptor)
        self._number = 0
        self._waiting: deque[bytes] = deque()
        if os.fstat(self._descriptor).st_size:
            # An earlier lead was killed, and its host's supervisor may still wait for it.
            self.write(Leave(state="failed", reason="the run is gone on with by another supervisor"))
        self.begins_at = os.fstat(self._descriptor).st_size
        """Where this lead's orders begin in the file: those before are an earlier one's."""

    def write(self, order: AnyOrder) -> int:
        """The order's number. On a full disk it waits, with those after it, for a `flush` that finds room."""
        self._number += 1
        self._waiting.append(msgspec.json.encode(msgspec.structs.replace(order, number=self._number)))
        self.flush()
        return self._number

    def flush(self) -> None:
        while self._waiting:
            torn, self._torn = self._torn, True
            try:
                write_line(self._descriptor, self._waiting[0], after_torn=torn)
            except OSError:
                return  # the run's own log says so, which has no room either
            self._torn = False
            self._waiting.popleft()

    def close(self) -> None:
        os.close(self._descriptor)


class OrderTail:
    """The host's: orders as they come."""

    def __init__(self, path: Path, begin: int) -> None:
        self._path = path
        self._offset = begin
        self._decoder = msgspec.json.Decoder(AnyOrder)

    def poll(self) -> list[AnyOrder]:
        """Raises msgspec.MsgspecError for what is no order: another version of llmtop leads."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [self._decoder.decode(line) for line in whole.splitlines() if line.strip()]

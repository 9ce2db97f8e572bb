"""One host over SSH: a thread keeps the connection, mends it when it breaks, and measures the clock."""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from llmtop.profiler.record.logend import end_lines
from llmtop.trainer.hosts.ssh import far_program
from llmtop.trainer.hosts.twin import Message, Twin

_PING_SECONDS = 2.0
_LOOK_SECONDS = 0.1
_DEAD_SECONDS = 20.0
"""Nothing heard for so long: begin again."""
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 10.0
_ROUND_TRIPS = 8
_PIPE_BYTES = 1 << 20
_MOST_WAITING_BYTES = 4 << 20
_MOST_BYTES = 4 << 30
"""Of a document; a snapshot of a large model's memory is the longest."""


class Clock(Struct, frozen=True, kw_only=True):
    """How far a host's clock is ahead of this one's."""

    offset_seconds: float
    error_seconds: float


class RoundTrips:
    """The newest measurements of a host's clock; the shortest says most."""

    def __init__(self) -> None:
        self._trips: deque[Clock] = deque(maxlen=_ROUND_TRIPS)
        self.best: Clock | None = None

    def add(self, sent: float, far: float, now: float) -> None:
        """Sent and come back by the clock here, and what the one there said in between."""
        if now < sent:
            return  # the clock here was set meanwhile
        self._trips.append(Clock(offset_seconds=far - (sent + now) / 2, error_seconds=(now - sent) / 2))
        self.best = min(self._trips, key=lambda trip: trip.error_seconds)


class Link:
    """`opening` is the first message, which names the folder; `twin` the folder here, if it is kept alike."""

    def __init__(
        self,
        command: Sequence[str],
        opening: dict[str, Any],
        twin: Twin | None,
        *,
        on_change: Callable[[], None] = lambda: None,
        take: Callable[[dict[str, Any], bytes], None] | None = None,
        look_seconds: float = _LOOK_SECONDS,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`on_change` is called in the thread when the connection or the supervisor may have changed.

        `take` gets what is for no folder, where there is no twin; `look_seconds` lie between two looks for
        what is to be sent.
        """
        self._command = list(command)
        self._opening = opening
        self._twin = twin
        self._on_change = on_change
        self._take = take
        self._look_seconds = look_seconds
        self._wall = wall
        self.opened = False
        """Whether the folder was opened on the present connection."""
        self.shared = False
        """Whether the far folder is this one."""
        self.there = False
        """Whether the far folder exists."""
        self.about: dict[str, Any] = {}
        """What the host says of itself; empty before the first connection."""
        self.far_path = ""
        self.supervisor_pid: int | None = None
        self.alive: bool | None = None
        """Who says in the far folder that it supervises, and whether it lives; None: nobody does yet."""
        self.heard_pong = False
        self.refused = False
        """Whether a connection has ended before the host had said anything."""
        self.failures = 0
        """Connections that llmtop has ended since all had come the last time: it did not understand what was
        said, or could not keep it."""
        self.spawned_pid: int | None = None
        self.ended_code: int | None = None
        """Exit code of what was started on the present connection; None while it lives."""
        self.holds_started = False
        """Whether something was started on the present connection; no more once its end was told."""
        self.told: str | None = None
        """What the file says that was asked about when the folder was opened; empty where it is not there."""
        self.runs: list[str] | None = None
        """Ids of the runs on the host, once they were asked for and told."""
        self.left_bytes: int | None = None
        """Of what was to come when the folder was last asked for; None before that is known."""
        self.came_bytes = 0
        """Since then."""
        self.problem = ""
        """Why there is no connection, as ssh says; or what the host cannot do, as it says."""
        self.heard_at = time.monotonic()
        self.synced = 0
        """Number of the newest `sync` that was answered: the folder here has what the far one had then."""
        self._trips = RoundTrips()
        self._pings: dict[int, float] = {}
        self._ping = 0
        self._asked_sync = 0
        self._to_say: deque[Message] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"llmtop-link {command[-2]}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """What was said before still goes out, unless the connection is gone."""
        self._closing.set()
        self._thread.join(timeout=5.0)

    @property
    def quiet_seconds(self) -> float:
        """Since anything was heard of the host."""
        return time.monotonic() - self.heard_at

    def say(self, message: dict[str, Any]) -> None:
        """Lost where the connection breaks before it is out."""
        self._to_say.append((message, None))

    def open(self, opening: dict[str, Any], twin: Twin | None) -> None:
        """Go over to a folder, on this connection and on those after it."""
        self._twin, self._opening = twin, opening
        self.say(opening)

    def follow_anew(self) -> int:
        """The twin keeps another selection now; the number that `synced` will have once that is here."""
        if self._twin is not None:
            self.left_bytes = None
            self.say(self._twin.follow_message())
        return self.sync()

    def sync(self) -> int:
        """Have it told, in `synced`, when all that is there by now is here; the number that it will have."""
        self._asked_sync += 1
        self.say({"do": "sync", "n": self._asked_sync})
        return self._asked_sync

    # --- the thread -----------------------------------------------------------------------------------

    def _keep(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._closing.is_set():
            try:
                self._connect()
            except (OSError, ValueError, OverflowError, RecursionError) as error:
                self.problem = str(error)
                self.failures += 1
            self.refused = self.refused or not self.about
            self.holds_started = False
            if self.opened:
                self.opened, pause = False, _FIRST_PAUSE_SECONDS
            # Of an attempt that failed too: why it did may be another reason now.
            self._on_change()
            self._closing.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _connect(self) -> None:
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            try:
                _Connection(self, process).serve()
            finally:
                process.kill()
                process.wait()
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        stream.close()
                self.problem = next(reversed(end_lines(errors)), self.problem)

    # --- what the connection tells --------------------------------------------------------------------

    def _heard(self, message: dict[str, Any], body: bytes) -> None:
        said = message["say"]
        if said == "pong":
            self.supervisor_pid, self.alive = message["pid"], message["alive"]
            self.heard_pong = True
            self._on_change()
            self._measure(message["n"], message["t"])
        elif said == "hello":
            self.about = message
            self.problem = ""
        elif said == "opened":
            self._opened(message)
        elif said == "synced":
            self.synced, self.failures = message["n"], 0
        elif said == "spawned":
            self.spawned_pid, self.ended_code = message["pid"], None
            self.holds_started = True
        elif said == "ended":
            self.ended_code, self.holds_started = message["code"], False
        elif said == "runs":
            self.runs = [str(name) for name in message["names"]]
        elif said == "problem":
            self.problem = f"{message['do']}: {message['why']}" if message["why"] else ""
        elif said == "size":
            self.left_bytes, self.came_bytes = int(message["bytes_left"]), 0
        elif self._twin is not None:
            self.came_bytes += len(body)
            self._twin.take(message, body)
        elif self._take is not None:
            self._take(message, body)

    def _opened(self, message: dict[str, Any]) -> None:
        self.far_path, self.shared, self.there = str(message["path"]), message["shared"], message["there"]
        if "told" in message:
            self.told = str(message["told"])
        if self._twin is not None and not self.shared:
            self._twin.forget_sent()
            self.say(self._twin.follow_message())
        self.opened = True
        if self._twin is not None:
            self.sync()

    def _next_ping(self) -> dict[str, Any]:
        self._ping += 1
        self._pings = {self._ping: self._wall()}
        return {"do": "ping", "n": self._ping}

    @property
    def clock(self) -> Clock | None:
        """None until an answer has come."""
        return self._trips.best

    def _measure(self, number: int, far: float) -> None:
        sent = self._pings.pop(number, None)
        if sent is not None:  # else an answer to an earlier connection's
            self._trips.add(sent, far, self._wall())


class _Connection:
    """Both directions of one ssh process, without waiting for either."""

    def __init__(self, link: Link, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._link = link
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        with suppress(OSError):  # more than a person may have: then both sides take turns more often
            fcntl.fcntl(self._out, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._read = bytearray()
        self._head: dict[str, Any] | None = None
        """Of a message whose bytes are still coming."""
        self._write = bytearray(far_program())
        self._began = time.monotonic()
        self._heard_any = False
        link._to_say.clear()
        self._add(link._opening, None)

    def serve(self) -> None:
        ping_at = look_at = time.monotonic()
        while not (self._link._closing.is_set() and not self._write and not self._link._to_say):
            now = time.monotonic()
            if now - (self._link.heard_at if self._heard_any else self._began) > _DEAD_SECONDS:
                raise OSError(f"nothing was heard for {_DEAD_SECONDS:g} s")
            # Where runs are listed no folder is opened, and who hears nothing for long leaves.
            if (self._link.opened or self._link._take is not None) and now >= ping_at:
                ping_at = now + _PING_SECONDS
                self._add(self._link._next_ping(), None)
            if self._link.opened and now >= look_at and len(self._write) < _MOST_WAITING_BYTES:
                look_at = now + self._link._look_seconds
                self._look()
            while self._link._to_say:
                self._add(*self._link._to_say.popleft())
            # What is said meanwhile goes out then.
            readable, writable = self._ready(self._link._look_seconds if self._link.opened else _LOOK_SECONDS)
            if writable and not self._send():
                return
            if readable and not self._take():
                return

    def _ready(self, seconds: float) -> tuple[bool, bool]:
        """Whether there is something to read, and room for what is to be written, within so many seconds."""
        # select() knows only the first 1,024 files of a process, and there may be as many hosts.
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        if self._write:
            poll.register(self._in, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(1e3 * seconds)}
        return self._out in ready, self._in in ready

    def _send(self) -> bool:
        """Whether somebody takes it: where ssh has ended, its own last words say why."""
        try:
            del self._write[: os.write(self._in, self._write)]
        except BrokenPipeError:
            return False
        return True

    def _look(self) -> None:
        twin = self._link._twin
        if twin is not None and not self._link.shared:
            for message, body in twin.news():
                self._add(message, body)

    def _add(self, message: dict[str, Any], body: bytes | None) -> None:
        head = message if body is None else {**message, "bytes": len(body)}
        self._write += json.dumps(head).encode() + b"\n" + (body or b"")

    def _take(self) -> bool:
        came = os.read(self._out, _PIPE_BYTES)
        if not came:
            return False
        self._heard_any = True
        # A document may take longer on its way than a silence may last.
        self._link.heard_at = time.monotonic()
        self._read += came
        while (told := self._next_message()) is not None:
            try:
                self._link._heard(*told)
            except (AttributeError, KeyError, TypeError) as error:
                raise ValueError(f"the host says what llmtop does not understand: {error!r}") from error
        return True

    def _next_message(self) -> tuple[dict[str, Any], bytes] | None:
        """A whole one with its bytes; None while it has not come. Raises ValueError for what is none."""
        if self._head is None:
            end = self._read.find(b"\n")
            if end < 0:
                if len(self._read) > _MOST_WAITING_BYTES:
                    raise ValueError("the host says a line without an end")
                return None
            line = bytes(self._read[:end])
            try:
                head = json.loads(line)
            except ValueError:
                head = None
            if not isinstance(head, dict):
                shown = line[:80].decode(errors="replace")
                raise ValueError(
                    f"it says '{shown}', which is no message of llmtop's; its shell may print nothing for ssh"
                )
            del self._read[: end + 1]
            self._head = head
        size = self._head.get("bytes", 0)
        if not isinstance(size, int) or not 0 <= size <= _MOST_BYTES:
            raise ValueError(f"the host says that {size!r} bytes follow")
        if len(self._read) < size:
            return None
        head, self._head = self._head, None
        body = bytes(self._read[:size])
        del self._read[:size]
        return head, body

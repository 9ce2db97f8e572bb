"""The far end of a link: sent over SSH to a host and run there by any Python 3.8, with its library alone.

It follows a folder and tells what grew in it, writes what it is given into it, tells of all runs that there
are, starts a supervisor, and answers pings. It speaks over its standard streams, opens no port, and ends
with the connection: also when nothing has come for `_SILENCE_SECONDS`, because a cable that is out ends no
connection by itself. Its modules are sent as one program (`farprogram.py`).

A message is a line of JSON; where it has `bytes`, so many follow.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtop.trainer.hosts.farfolder import Followed
from llmtop.trainer.hosts.farruns import glances

_SILENCE_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 0.5
_IDLE_SHARE = 30.0
"""A look at the folder that takes long is made the more seldom."""
_MOST_WAITING_BYTES = 1 << 20
_WRITE_AGAIN_SECONDS = 1.0
_ORDERS_WAIT_SECONDS = 60.0
"""For a document that cannot be written; then they go on without it, and who acts on one says so."""
_OF_ONE_FILE = (
    *(errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM),
    *(errno.ETXTBSY, errno.ENOTEMPTY, errno.EXDEV),
)
"""Problems that others have not because this one has; any other is of the disk, and holds up all."""


class Far:
    def __init__(self) -> None:
        self._read = b""
        self._write = bytearray()
        self._followed: Followed | None = None
        self._root = Path()
        self._pid_path = ""
        self._children: list[subprocess.Popen[bytes]] = []
        self._unwritten: collections.deque[tuple[dict[str, Any], bytes]] = collections.deque()
        """What this folder is to have and has not, in its order: the disk is full, most likely."""
        self._stuck: dict[str, float] = {}
        """Since when each file waits that cannot be written, whatever room there is."""
        self._write_at = 0.0
        self._unable = ""
        """Why nothing can be written, as was told; empty while it can."""
        self._sign = ""
        """Name of the other side's sign of life."""
        self._listing: Iterator[tuple[dict[str, Any], bytes]] | None = None
        """What is left to tell of the runs here."""
        self._sync: int | None = None
        self._pong: dict[str, Any] | None = None
        """An answer that is held back until the folder has been looked at."""
        self._heard = time.monotonic()
        self._look_at = 0.0
        os.set_blocking(0, False)
        os.set_blocking(1, False)

    def say(self, message: dict[str, Any], body: bytes | None = None) -> None:
        if body is not None:
            message["bytes"] = len(body)
        self._write += json.dumps(message).encode() + b"\n" + (body or b"")

    def full(self) -> bool:
        return len(self._write) > _MOST_WAITING_BYTES

    def serve(self) -> None:
        self.say(_about_this_machine())
        while time.monotonic() - self._heard < _SILENCE_SECONDS:
            wait = self.pause_seconds(time.monotonic())
            self._tell_ends()
            if self._unwritten and time.monotonic() >= self._write_at:
                self._keep()
            readable, writable, _ = select.select([0], [1] if self._write else [], [], wait)
            if readable and not self._take():
                return
            if writable:
                del self._write[: os.write(1, self._write)]
            self._list()
            if self._followed is not None and time.monotonic() >= self._look_at and not self.full():
                self._look(self._followed)

    def _look(self, followed: Followed) -> None:
        """Tell what is new in the folder, and then what waited for that."""
        began = time.monotonic()
        done = followed.look(self.say, self.full)
        if done:
            self._tell_pong()
            if self._sync is not None:
                self.say({"say": "synced", "n": self._sync})
                self._sync = None
        took = time.monotonic() - began
        self._look_at = time.monotonic() + (max(_LOOK_SECONDS, _IDLE_SHARE * took) if done else 0.0)

    def pause_seconds(self, now: float) -> float:
        """How long to wait for the other side: to the next look at the folder, where there is one to follow
        and room for what it tells; longest while there is nothing to look at."""
        if self._listing is not None and not self.full():
            return 0.0
        if self._followed is None or self.full():
            return _LONGEST_PAUSE_SECONDS
        return max(0.0, min(_LONGEST_PAUSE_SECONDS, self._look_at - now))

    def _list(self) -> None:
        """Tell of as many runs as there is room for."""
        while self._listing is not None and not self.full():
            told = next(self._listing, None)
            if told is None:
                self._listing = None
                self.say({"say": "listed"})
            else:
                self.say(*told)

    def _take(self) -> bool:
        """Whether the other side is still there."""
        try:
            came = os.read(0, 1 << 16)
        except BlockingIOError:
            return True
        if not came:
            return False
        self._heard = time.monotonic()
        self._read += came
        while b"\n" in self._read:
            line, _, rest = self._read.partition(b"\n")
            message = json.loads(line)
            size = message.get("bytes", 0)
            if len(rest) < size:
                break
            self._read = rest[size:]
            try:
                self._do(message, rest[:size])
            except (OSError, ValueError) as error:
                self.say({"say": "problem", "do": message.get("do"), "why": str(error)})
        return True

    def _do(self, message: dict[str, Any], body: bytes) -> None:
        do = message["do"]
        if do == "ping":
            pid, alive = self._supervisor()
            self._pong = {"say": "pong", "n": message["n"], "t": time.time(), "pid": pid, "alive": alive}
            if alive is False and self._followed is not None:
                # Its last words are there before that.
                self._look_at = 0.0
            else:
                self._tell_pong()
        elif do == "runs":
            self.say({"say": "runs", "names": _runs(Path(message.get("root") or runs_root()))})
        elif do == "list":
            root = message.get("root") or runs_root()
            self.say({"say": "listing", "root": root, "now": time.time()})
            self._listing = glances(Path(root), message["files"], message["of_hosts"], lives)
        elif do == "open":
            self._open(message)
        elif do == "follow":
            patterns = (message["grow"], message["last"], message["whole"])
            known = (message["have"], message["newest"], message["seen"])
            self._followed = Followed(self._root, *patterns, *known)
            self.say({"say": "size", "bytes_left": self._followed.left_bytes()})
        elif do == "sync":
            # Once all is told that is there by now.
            self._sync, self._look_at = message["n"], 0.0
            if self._followed is None:
                self.say({"say": "synced", "n": message["n"]})
        elif do == "put" and message["path"] == self._sign:
            self._give_sign(body)
        elif do in ("put", "append", "remove"):
            self._queue(message, body)
        elif do == "spawn":
            self.say({"say": "spawned", "pid": self._spawn(message)})

    def _queue(self, message: dict[str, Any], body: bytes) -> None:
        self._unwritten.append((message, body))
        if len(self._unwritten) == 1:
            self._keep()

    def _keep(self) -> None:
        """Write what came, in its order: an order may tell of documents that came before it.

        A file that cannot be written, whatever room there is, waits by itself: other documents go past it at
        the next turn, and so do orders once they have waited for it. Each such file is waited for by itself.
        """
        waiting: collections.deque[tuple[dict[str, Any], bytes]] = collections.deque()
        stuck: set[str] = set()
        why, now, orders_wait = "", time.monotonic(), False
        while self._unwritten:
            message, body = self._unwritten[0]
            path = message["path"]
            if path in stuck or (orders_wait and message["do"] == "append"):
                waiting.append(self._unwritten.popleft())
                continue
            try:
                self._write_one(message, body)
            except OSError as error:
                words = error.strerror or str(error)
                if error.errno not in _OF_ONE_FILE:
                    why = words
                    break
                why = why or f"{path}: {words}"
                stuck.add(path)
                since = self._stuck.setdefault(path, now)
                orders_wait = orders_wait or now - since < _ORDERS_WAIT_SECONDS
                waiting.append((message, body))
            except ValueError as error:
                # It will never do.
                self.say({"say": "problem", "do": message["do"], "why": str(error)})
            self._unwritten.popleft()
        self._unwritten.extendleft(reversed(waiting))
        left = {message["path"] for message, _ in self._unwritten}
        self._stuck = {path: since for path, since in self._stuck.items() if path in left}
        if self._unwritten:
            self._write_at = time.monotonic() + _WRITE_AGAIN_SECONDS
        self._tell_unable(why)

    def _tell_unable(self, why: str) -> None:
        if why != self._unable:
            self._unable = why
            self.say({"say": "problem", "do": "write", "why": why})

    def _write_one(self, message: dict[str, Any], body: bytes) -> None:
        do, path = message["do"], self._inside(message["path"])
        if do == "put":
            _replace(path, body)
        elif do == "append":
            _append(path, message["at"], body)
        else:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def _give_sign(self, body: bytes) -> None:
        """A full disk has room for its time: who looks for it sees that it changes."""
        path = self._inside(self._sign)
        try:
            _replace(path, body)
        except OSError as error:
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
            self._tell_unable(error.strerror or str(error))
        else:
            if not self._unwritten:
                self._tell_unable("")

    def _open(self, message: dict[str, Any]) -> None:
        """The run's folder: the lead's own where its path leads to the same file here, else this host's."""
        mark, theirs = message.get("mark", ""), Path(message.get("path", ""))
        shared = bool(mark) and mark in _text(theirs / message["mark_in"])
        self._root = theirs if shared else Path(message.get("root") or runs_root(), message["id"])
        self._pid_path, self._sign = message.get("pid", ""), message.get("mark_in", "")
        self._unwritten.clear()
        self._stuck.clear()
        self._unable = ""
        if message.get("make"):
            self._root.mkdir(parents=True, mode=0o700, exist_ok=True)
        there = self._root.is_dir()
        told = {"told": _text(self._root / message["tell"])} if "tell" in message else {}
        self.say({"say": "opened", "path": str(self._root), "shared": shared, "there": there, **told})

    def _inside(self, name: str) -> Path:
        parts = name.split("/")
        if not self._root.is_absolute() or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{name} is no file of a run")
        path = self._root.joinpath(*parts)
        path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        return path

    def _tell_pong(self) -> None:
        if self._pong is not None:
            self.say(self._pong)
            self._pong = None

    def _spawn(self, message: dict[str, Any]) -> int:
        """Start a process that outlives this one. Its variables come in the message and lie in no file."""
        log = os.open(self._inside(message["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        folder = message.get("folder") or ""
        try:
            process = subprocess.Popen(
                [word.replace("{run}", str(self._root)) for word in message["command"]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=folder if folder and Path(folder).is_dir() else Path.home(),
                env={**os.environ, **message["environment"]},
            )
        finally:
            os.close(log)
        self._children.append(process)
        return process.pid

    def _tell_ends(self) -> None:
        for child in [child for child in self._children if child.poll() is not None]:
            self._children.remove(child)
            self.say({"say": "ended", "pid": child.pid, "code": child.returncode})

    def _supervisor(self) -> tuple[int | None, bool | None]:
        """Who wrote its pid into the folder as the supervisor, and whether it lives; None: nobody has."""
        if not self._pid_path:
            return None, None
        try:
            told = json.loads((self._root / self._pid_path).read_text(encoding="utf-8"))
            return told["pid"], lives(told)
        except (OSError, ValueError, KeyError):
            return None, None


def lives(told: dict[str, Any]) -> bool:
    """Whether a process is still the one that was written down, and not a later one with its pid."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        stat = Path("/proc", str(told["pid"]), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    fields = stat.rpartition(")")[2].split()
    return (
        fields[0] not in ("Z", "X")
        and int(fields[19]) == told.get("started_ticks")
        and boot_id == told.get("boot_id")
    )


def _about_this_machine() -> dict[str, Any]:
    return {
        "say": "hello",
        "node": socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "runs_root": runs_root(),
    }


def runs_root() -> str:
    """As `llmtop.profiler.record.rundir.runs_root` has it, on this machine."""
    explicit, state = os.environ.get("LLMTOP_RUNS_DIR"), os.environ.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local" / "state"
    return explicit or str(base / "llmtop" / "runs")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _runs(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("[!.]*/spec.json"))


def _replace(path: Path, body: bytes) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(body)
        aside.replace(path)
    except OSError:
        aside.unlink()
        raise


def _append(path: Path, at: int, body: bytes) -> None:
    """What the file has of it already is passed over: after a reconnection all of it comes again."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        size = os.fstat(descriptor).st_size
        if size < at:
            raise ValueError(f"{path} ends before byte {at}")
        file.seek(size)
        file.write(body[size - at :])


if __name__ == "__main__":
    # A pipe that breaks is the other side leaving.
    with contextlib.suppress(BrokenPipeError, ConnectionError):
        Far().serve()

"""A pseudo-terminal with a program in it, which can be looked at, typed into and torn away."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping
from typing import Self

ROWS, COLUMNS = 40, 120
PATIENCE_SECONDS = 180.0


class Terminal:
    """The program is the leader of a session whose controlling terminal this is, as in a real one."""

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        # A session leader that opens a terminal gets it as its controlling one; so the shell opens it.
        self.process = subprocess.Popen(
            ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(slave), *command],
            env={**env, "TERM": "xterm-256color"},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._slave = slave
        self._wake = os.pipe()
        self._closed = False
        self._shown = bytearray()
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_SECONDS)
        self.close()

    def _read(self) -> None:
        """Until told to end; a read that blocks would keep the terminal alive after its close."""
        while True:
            ready, _, _ = select.select([self._master, self._wake[0]], [], [])
            if self._wake[0] in ready:
                return
            try:
                piece = os.read(self._master, 65536)
            except OSError:  # nobody has the terminal open any more
                return
            with self._changed:
                self._shown += piece
                self._changed.notify_all()

    def wait_for(self, text: str) -> None:
        """Until `text` has been written to the terminal in one piece."""
        wanted = text.encode()
        deadline = time.monotonic() + PATIENCE_SECONDS
        with self._changed:
            while wanted not in self._shown:
                left = deadline - time.monotonic()
                alive = self.process.poll() is None
                assert left > 0 and alive, f"no {text!r} in {bytes(self._shown[-3000:])!r}"
                self._changed.wait(min(left, 1.0))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def close(self) -> None:
        """Tear the terminal away: what runs in it gets SIGHUP from the kernel."""
        if self._closed:
            return
        self._closed = True
        os.write(self._wake[1], b"x")
        self._reader.join(PATIENCE_SECONDS)
        for descriptor in (self._slave, self._master, *self._wake):
            os.close(descriptor)

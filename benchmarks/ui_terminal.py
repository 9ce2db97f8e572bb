"""A program in a pseudo-terminal: what it wrote and when, how it answers to keys, what it costs."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Self

import psutil

_ESCAPES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]")
GIVE_UP_SECONDS = 120.0
_SETTLED_SECONDS = 5.0
_MARK = "LLMTOP_BENCH_TERMINAL"
"""In the environment of a measured program and of all that it starts, also in sessions of their own."""


_NUMBERS = count()


class Cost:
    """Processor seconds and bytes to the terminal between two looks at a program."""

    def __init__(self, terminal: BenchTerminal) -> None:
        self._terminal = terminal
        self._began = time.monotonic()
        self._cpu = terminal.cpu_seconds()
        self._bytes = terminal.written

    def so_far(self) -> tuple[float, float, float]:
        """Seconds, share of a core, bytes a second."""
        seconds = time.monotonic() - self._began
        cpu = self._terminal.cpu_seconds() - self._cpu
        return seconds, cpu / seconds, (self._terminal.written - self._bytes) / seconds


class BenchTerminal:
    """Reads all the time, as a terminal does, and notes when words came."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        columns: int = 80,
        rows: int = 24,
        with_children: bool = False,
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._mark = f"{os.getpid()}-{next(_NUMBERS)}"
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            list(command),
            env={**env, "TERM": "xterm-256color", "COLORTERM": "truecolor", _MARK: self._mark},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self._measured = psutil.Process(self.process.pid)
        self._with_children = with_children
        self.written = 0
        self._shown = bytearray()
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self._end_what_it_started()
        self._reader.join(5)
        os.close(self._master)

    def _end_what_it_started(self) -> None:
        """Peers leave servers of their own behind, which would be in every later figure."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark:
                    process.kill()
            except psutil.Error:
                continue  # gone, or somebody else's

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self._master], [], [], 1.0)
            if not ready:
                if self.process.poll() is not None:
                    return
                continue
            try:
                piece = os.read(self._master, 65536)
            except OSError:  # the program has closed its end
                return
            if not piece:
                return
            with self._changed:
                self.written += len(piece)
                self._shown += piece
                self._changed.notify_all()

    def forget(self) -> None:
        """Only what comes from now on is looked at."""
        with self._changed:
            self._shown.clear()

    def wait_for(self, *words: str, give_up: float = GIVE_UP_SECONDS) -> float:
        """When all the words had come, by `perf_counter`."""
        wanted = [word.encode() for word in words]
        end = time.monotonic() + give_up
        with self._changed:
            while True:
                plain = _ESCAPES.sub(b"", bytes(self._shown))
                if all(word in plain for word in wanted):
                    return time.perf_counter()
                left = end - time.monotonic()
                if left <= 0 or (self.process.poll() is not None and not self._reader.is_alive()):
                    raise TimeoutError(f"no {words} in {plain[-1500:]!r}")
                self._changed.wait(min(left, 0.5))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def cpu_seconds(self) -> float:
        """Of the program, and of what it has started and still runs where that is measured too."""
        times = [process.cpu_times() for process in self._all_measured()]
        return float(sum(one.user + one.system for one in times))

    def rss_bytes(self) -> int:
        return sum(int(process.memory_info().rss) for process in self._all_measured())

    def _all_measured(self) -> list[psutil.Process]:
        children = self._measured.children(recursive=True) if self._with_children else []
        return [self._measured, *(child for child in children if child.is_running())]


def cost_at_rest(terminal: BenchTerminal, seconds: float) -> dict[str, float]:
    """Of a program on its screen, once what its start takes is over."""
    time.sleep(_SETTLED_SECONDS)
    cost = Cost(terminal)
    time.sleep(seconds)
    took, share, rate = cost.so_far()
    return {
        "cpu_percent_of_a_core": 100 * share,
        "terminal_bytes_per_second": rate,
        "rss_bytes": terminal.rss_bytes(),
        "seconds": took,
    }

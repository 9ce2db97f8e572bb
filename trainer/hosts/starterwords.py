"""What srun and pdsh say of each host that they have called: which has ended, and its own last words."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from llmtop.presets.errors import UsageError
from llmtop.trainer.hosts.slurm import expand

_ENDED = {
    "pdsh": re.compile(r"pdsh@[^:]+: (?P<hosts>[^:]+): ssh (?P<how>(?:exited|killed) .+)"),
    "srun": re.compile(r"srun: error: (?P<hosts>\S+): tasks? [-\d,]+: (?P<how>.+)"),
}
"""They go on with the other hosts, and say only in passing that one has ended (pdsh 2.34, Slurm 22.05)."""
_NOT_LAUNCHED = re.compile(r"srun: error: task (?P<task>\d+) (?P<how>launch failed: .+)")
_MOST_KEPT = 3


class Call(Struct, frozen=True, kw_only=True):
    command: tuple[str, ...]
    hosts: tuple[str, ...]
    """That it starts, in this order."""

    @property
    def program(self) -> str:
        return Path(self.command[0]).name


class StarterWords:
    def __init__(self, calls: Sequence[Call], log: Path, begin: int) -> None:
        """All calls are of one program and write into `log`, from byte `begin` on."""
        self._log, self._offset = log, begin
        self._program = calls[0].program
        self._names = {without_user(host): host for call in calls for host in call.hosts}
        # Of several calls each begins to count at 0.
        self._tasks = calls[0].hosts if len(calls) == 1 else ()
        self._ended: dict[str, str] = {}
        self._own: dict[str, deque[str]] = {}
        self._newest: deque[str] = deque(maxlen=_MOST_KEPT)

    def how_ended(self, host: str) -> str:
        """Empty while nothing was said of its end."""
        self._read()
        return self._ended.get(host, "")

    def of(self, host: str) -> str:
        """Its own last words; empty where it has said none."""
        self._read()
        return " / ".join(self._own.get(host, ()))

    def newest(self) -> str:
        """The last that was said at all."""
        self._read()
        return " / ".join(self._newest)

    def _read(self) -> None:
        if self._log.stat().st_size <= self._offset:
            return
        with self._log.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self._note(line.strip())

    def _note(self, line: str) -> None:
        self._newest.append(line)
        label, _, words = line.partition(": ")
        host = self._task(label) if self._program == "srun" else self._names.get(label)
        if host is not None:
            self._own.setdefault(host, deque(maxlen=_MOST_KEPT)).append(words)
        ended, task = _ENDED[self._program].match(line), _NOT_LAUNCHED.match(line)
        if ended is not None:
            for name in self._named(ended["hosts"]):
                self._ended.setdefault(name, ended["how"].lower())
        elif task is not None and (host := self._task(task["task"])) is not None:
            self._ended.setdefault(host, task["how"])

    def _task(self, number: str) -> str | None:
        at = int(number) if number.isdecimal() else len(self._tasks)
        return self._tasks[at] if at < len(self._tasks) else None

    def _named(self, text: str) -> list[str]:
        try:
            names = list(expand(text))
        except UsageError:
            return []  # a line that only looks like one of these
        return [self._names[name] for name in names if name in self._names]


def without_user(host: str) -> str:
    """pdsh and Slurm tell of a host without the user that it is reached as."""
    return host.rpartition("@")[2]

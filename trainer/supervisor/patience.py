"""How long the supervisor waits for ranks, and what it does to them when it has waited."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
from msgspec import Struct

from llmtop.presets.errors import UsageError

VARIABLE = "LLMTOP_GRACES"
"""As `peers=0.5,kill=1`; for tests, and for machines where everything takes longer."""

Action = Literal["terminate", "kill"]


class Graces(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds."""

    peers: float = 5.0
    """After one rank failed: the others may be writing what they saw."""
    kill: float = 10.0
    """From SIGTERM to SIGKILL."""
    stop: float = 4.0
    """For stopping without a checkpoint: the step that the ranks are in, if it is over by then. A person who
    saves nothing wants the machine back."""
    stop_kill: float = 3.0
    """From SIGTERM to SIGKILL then."""
    script: float = 60.0
    """For a command of the user's own that was sent SIGTERM and does not ignore it: it may be saving."""
    save: float = 900.0
    """For stopping with a checkpoint, on top of a few steps' time."""
    folder: float = 10.0
    """After the run's folder was removed: then the run ends, since nobody can find it any more."""
    ready: float = 600.0
    """For ranks that are started beside others to have loaded what they need."""
    finish: float = 120.0
    """After the first rank finished: the others do the same last step."""
    driver: float = 10.0
    """For the driver of the GPUs to be opened; ranks are not held up by one that hangs."""
    connect: float = 40.0
    """For each host of several to be reached; ssh itself tries for 10 s at a time."""
    host: float = 300.0
    """For a host of several that is not heard of, and of a host for the lead: then its ranks are ended."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Graces:
        given = environment.get(VARIABLE, "")
        pairs = dict(item.partition("=")[::2] for item in given.split(",") if item)
        try:
            return msgspec.convert(pairs, cls, strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"{VARIABLE} = {given!r} is not valid", why=str(error), fix="write it as peers=5,kill=10"
            ) from error


class Patience:
    """One countdown at a time: first SIGTERM, then SIGKILL."""

    def __init__(self, kill_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.waiting_for = ""
        """What the ranks did not do in time, in words; empty while nobody is waited for."""
        self._kill_seconds = kill_seconds
        self._clock = clock
        self._due: list[tuple[float, Action]] = []
        self._over = False

    def wait(self, seconds: float, waiting_for: str, *, kill_seconds: float | None = None) -> None:
        """Begin a countdown, unless one is running that ends earlier, or has ended.

        `kill_seconds` from SIGTERM to SIGKILL, where that is not the usual time.
        """
        start = self._clock() + seconds
        end = start + (self._kill_seconds if kill_seconds is None else kill_seconds)
        if self._over or self._due and self._due[-1][0] <= end:
            return
        self.waiting_for = waiting_for
        self._due = [(start, "terminate"), (end, "kill")]

    @property
    def over(self) -> bool:
        """Whether nobody is waited for any longer: all were killed."""
        return self._over

    def next_action(self) -> Action | None:
        """What is due now."""
        if not self._due or self._due[0][0] > self._clock():
            return None
        action = self._due.pop(0)[1]
        self._over = action == "kill"
        return action

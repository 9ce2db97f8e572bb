"""Follows a run's record and copies its figures, until the run has ended. No rank knows of it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.export.secrets import Scrubber
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.mirrors.scalars import Rows
from llmtop.profiler.mirrors.targets import Asked, Described, Target, open_targets
from llmtop.profiler.record.changeevents import ChangeApplied, RestageBegan, RestageFailed
from llmtop.profiler.record.events import AnyEvent
from llmtop.profiler.record.feed import FreshStarts, LateLine, RunReader, RunStream
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.scriptevents import DevicesFound, RunDescribed

POLL_SECONDS = 1.0
_TO_ANOTHER = (ChangeApplied, RestageBegan, RestageFailed, DevicesFound, RunDescribed)


def mirror(
    run: RunDir,
    asked: Asked,
    environment: Mapping[str, str],
    *,
    pause: Callable[[], None] = lambda: time.sleep(POLL_SECONDS),
) -> int:
    """Copy everything from the beginning on; the number of rows. Raises LlmtopError where a place fails."""
    told = describe(run, 0, environment)
    try:
        targets = open_targets(asked, told)
        return _follow(run, targets, told, environment, pause)
    except LlmtopError:
        raise
    except Exception as error:
        # Whatever a library of somebody else raises: a place that is full, away, or asks for a key.
        raise LlmtopError(
            f"the figures of {run.run_id} are not copied any more",
            why=Scrubber(environment).text(f"{type(error).__name__}: {error}"),
            fix=f"mend it, then copy them anew: llmtop mirror {run.run_id} ...; the run itself goes on",
        ) from error


def describe(run: RunDir, setting: int, environment: Mapping[str, str]) -> Described:
    """On one of its settings, as far as it is known: of a script only what was seen of it is."""
    spec: RunSpec = run.spec(setting)
    told: dict[str, Any] = {
        name: getattr(spec.options, name) for name in spec.options.__struct_fields__ if spec.knows(name)
    }
    if spec.is_known:
        told["model_name"] = spec.model.name
    if spec.knows("gpu"):
        told["gpu_name"] = spec.gpu.name
    told["recipe"] = spec.name
    return Described(run_id=run.run_id, setting=setting, options=Scrubber(environment).value(told))


def _follow(
    run: RunDir,
    targets: list[Target],
    told: Described,
    environment: Mapping[str, str],
    pause: Callable[[], None],
) -> int:
    events, reader, rows, written = _Events(run), RunReader(run), Rows(), 0
    state = RunState()
    while True:
        # Asked before reading: what a run writes before its end is then read too.
        status = reader.poll().status
        for part in (part for batch in events.new() for part in _by_setting(batch)):
            for row in rows.of(part):
                written += 1
                for target in targets:
                    target.write(row)
            state = fold(state, part)
            if state.changes.setting != told.setting:
                told = describe(run, state.changes.setting, environment)
                for target in targets:
                    target.describe(told, rows.step)
        for target in targets:
            target.flush()
        if status in ENDED:
            for target in targets:
                target.close(status)
            return written
        pause()


def _by_setting(batch: Sequence[AnyEvent]) -> Iterator[list[AnyEvent]]:
    """Parts of it that end with what may put another setting in force."""
    part: list[AnyEvent] = []
    for event in batch:
        part.append(event)
        if isinstance(event, _TO_ANOTHER):
            yield part
            part = []
    if part:
        yield part


class _Events:
    """Each event of a run once, also where its record is thinned under this reader, or where it is found that
    a host's clock is another one."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._stream = RunStream(run)
        self._fresh_starts = FreshStarts(run)
        self._given_until = self._known_until = -math.inf
        """Times of the newest event given, and of that at the newest beginning."""
        self._passed = Counter[str]()
        """Events that the stream has given so far, by who wrote them."""
        self._known = Counter[str]()
        """How many of each were given before the newest beginning and come again."""

    def new(self) -> Iterator[list[AnyEvent]]:
        """Raises LlmtopError where they cannot be read to their end."""
        while True:
            try:
                for batch in self._stream.batches():
                    yield [event for event in batch if event.t > self._known_until and self._is_new(event)]
                    self._given_until = max(self._given_until, *(event.t for event in batch))
                    self._passed.update(event.src for event in batch)
                self._fresh_starts.arrived()
                return
            except LateLine:
                self._fresh_starts.one_more()
                self._begin_anew()

    def _is_new(self, event: AnyEvent) -> bool:
        if not self._known:
            return True
        left = self._known[event.src]
        if left == 1:
            del self._known[event.src]
        elif left:
            self._known[event.src] = left - 1
        return not left

    def _begin_anew(self) -> None:
        before, self._stream = self._stream, RunStream(self._run)
        if self._stream.begin.clocks == before.begin.clocks:
            self._known_until, self._known = self._given_until, Counter()
        else:
            # Times are others now; but each log keeps its order.
            self._known += self._passed
            self._known_until = self._given_until = -math.inf
        self._passed = Counter()

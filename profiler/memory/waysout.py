"""Ways to make a run fit: the changes alone and together, searched with the predictor.

A way has no part that it fits without. Those that train the same come first, the fastest by prediction first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.changes import (
    Change,
    Predict,
    Step,
    allowed,
    different_changes,
    free_changes,
    slower_changes,
    suggestion,
)
from llmtop.profiler.memory.result import Prediction, Suggestion

MOST = 5
"""As many as have a key in the plan screen."""
MOST_OTHERS = 2
"""Of them, where the same training fits too, those of another one."""
MOST_TOGETHER = 4
CANDIDATES = 150
"""A prediction takes some 90 microseconds: all of them a fiftieth of a second, where so many are needed."""
SMALLEST_GAIN = 0.01
"""A change that lowers what is needed by less is not worth a line."""
WORTH_ONE_MORE = 1.1
"""A way that holds all kinds of change of another one must be faster by this factor to be told too."""
_OFFLOADS = frozenset(("offload_optimizer", "offload_param"))


class _Way(Struct, frozen=True, kw_only=True):
    steps: tuple[Step, ...]
    then: Prediction

    @property
    def rate(self) -> float:
        return self.then.tokens_per_second or 0.0

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(key for step in self.steps for key in step.change)

    @property
    def is_offload(self) -> bool:
        return not self.keys.isdisjoint(_OFFLOADS)


class _Search:
    """Tries sets of changes. Of each kind (the options that it sets) the strongest is tried first; of what
    fits so, milder ones then, which cost less."""

    def __init__(self, spec: RunSpec, predict: Predict, steps: Sequence[Step]) -> None:
        self._spec = spec
        self._predict = predict
        self._left = CANDIDATES
        self._kinds: dict[frozenset[str], list[Step]] = {}
        for step in steps:
            self._kinds.setdefault(frozenset(step.change), []).append(step)

    def strongest(self, steps: Sequence[Step]) -> list[Step]:
        """Of each kind the last that works alone; where none does, one may work in company."""
        last: dict[frozenset[str], Step] = {}
        for step in steps:
            kind = frozenset(step.change)
            if kind not in last or allowed(self._spec, step.change) is not None:
                last[kind] = step
        return list(last.values())

    def tried(self, steps: tuple[Step, ...]) -> _Way | None:
        """None for changes that exclude each other or cannot run, and where enough was tried."""
        change: Change = {}
        for step in steps:
            if not change.keys().isdisjoint(step.change):
                return None
            change |= step.change
        changed = allowed(self._spec, change) if self._left > 0 else None
        if changed is None:
            return None
        self._left -= 1
        return _Way(steps=steps, then=self._predict(changed))

    def minimal(self, sets: Iterable[tuple[Step, ...]], found: list[_Way]) -> None:
        """Adds those that fit and hold no other way that does."""
        for steps in sets:
            if any(all(one in steps for one in way.steps) for way in found):
                continue
            way = self.tried(steps)
            if way is not None and way.then.fits:
                found.append(way)

    def milder(self, way: _Way) -> _Way:
        """As little of each kind as leaves room to spare, else as fits; in the order that is faster."""
        places = range(len(way.steps))
        ways = [self._milder(way, order) for order in (places, places[::-1])[: len(way.steps)]]
        return max(ways, key=lambda one: (not one.then.tight, one.rate))

    def _milder(self, way: _Way, order: Sequence[int]) -> _Way:
        for place in order:
            mild = self._kinds[frozenset(way.steps[place].change)]
            for step in mild[: mild.index(way.steps[place])]:
                other = self.tried((*way.steps[:place], step, *way.steps[place + 1 :]))
                if other is not None and other.then.fits and (way.then.tight or not other.then.tight):
                    way = other
                    break
        return way


def ways_out(spec: RunSpec, now: Prediction, predict: Predict) -> tuple[Suggestion, ...]:
    """Those that fit; where none was found, the single changes that need less."""
    same = [*free_changes(spec), *slower_changes(spec)]
    others = list(different_changes(spec))
    search = _Search(spec, predict, [*same, *others])
    strong = search.strongest(same)
    alone = [way for step in (*strong, *others) if (way := search.tried((step,))) is not None]
    found = [way for way in alone if way.then.fits and way.steps[0] in strong]
    other = [way for way in alone if way.then.fits and way.steps[0] in others]
    _search_together(search, strong, found)
    if not other and all(way.is_offload for way in found):
        search.minimal(((one, step) for one in others for step in strong), other)
    if not found and not other:
        piled = _piled(spec, now, predict, [*same, *others])
        return (piled,) if piled is not None else _nearest(now, alone)
    best, rest = (_told([search.milder(way) for way in ways]) for ways in (found, other))
    best = best[: MOST - min(len(rest), MOST_OTHERS)]
    return tuple(suggestion(_in_words(way), now, way.then) for way in (*best, *rest[: MOST - len(best)]))


def _search_together(search: _Search, steps: Sequence[Step], found: list[_Way]) -> None:
    """Two at a time; more only where all that fits moves something to the host, which is slow."""
    search.minimal(combinations(steps, 2), found)
    on_device = [step for step in steps if _OFFLOADS.isdisjoint(step.change)]
    for size in range(3, MOST_TOGETHER + 1):
        if all(way.is_offload for way in found):
            search.minimal(combinations(on_device, size), found)
    if not found:
        search.minimal(combinations(steps, 3), found)


def _in_words(way: _Way) -> list[Step]:
    """What the run then trains first, then where its state lies."""
    return sorted(way.steps, key=lambda step: ("lora_rank" not in step.change, "zero" not in step.change))


def _told(ways: Sequence[_Way]) -> list[_Way]:
    """Of each kind the fastest with room to spare, else the fastest; none with more kinds of change than
    another that is about as fast."""
    kinds: dict[frozenset[str], _Way] = {}
    for way in sorted(ways, key=lambda way: (way.then.tight, -way.rate, len(way.steps))):
        kinds.setdefault(way.keys, way)
    told = kinds.values()
    return [
        way
        for way in sorted(told, key=lambda way: (-way.rate, len(way.steps)))
        if not any(other.keys < way.keys and way.rate < other.rate * WORTH_ONE_MORE for other in told)
    ]


def _nearest(now: Prediction, alone: Sequence[_Way]) -> tuple[Suggestion, ...]:
    """Single changes that need less and do not fit either, what needs least first."""
    ceiling = _asked_bytes(now) * (1 - SMALLEST_GAIN)
    less = [way for way in alone if _asked_bytes(way.then) < ceiling]
    less.sort(key=lambda way: _asked_bytes(way.then))
    return tuple(suggestion(way.steps, now, way.then) for way in less[:MOST])


def _asked_bytes(of: Prediction) -> int:
    """What decides whether it fits: bounds and loading are in it, which a lower peak need not lower."""
    return of.needed_bytes or of.peak_allocated_bytes


def _piled(spec: RunSpec, now: Prediction, predict: Predict, steps: Sequence[Step]) -> Suggestion | None:
    """Changes piled up, from free to dear, until the run fits; None when it never does."""
    pile: list[Step] = []
    best = _asked_bytes(now)
    for step in steps:
        # A later change that sets the same options replaces the earlier one.
        kept = [one for one in pile if not one.change.keys() <= step.change.keys()]
        change = {key: value for one in (*kept, step) for key, value in one.change.items()}
        changed = allowed(spec, change)
        if changed is None:
            continue
        then = predict(changed)
        if _asked_bytes(then) >= best * (1 - SMALLEST_GAIN):
            continue
        pile, best = [*kept, step], _asked_bytes(then)
        if then.fits:
            return suggestion(pile, now, then)
    return None

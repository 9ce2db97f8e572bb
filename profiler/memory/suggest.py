"""Changes that would make a run fit, or use the room that it leaves, the fastest first."""

from __future__ import annotations

from collections.abc import Iterator

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.changes import Change, Predict, Step, allowed, checkpointing, compute, suggestion
from llmtop.profiler.memory.result import Prediction, Suggestion

SMALLEST_GAIN = 0.01
"""A change that gains less is not worth a line."""
MOST = 6


def suggestions(spec: RunSpec, prediction: Prediction, predict: Predict) -> tuple[Suggestion, ...]:
    """Changes that lower the peak of a run that does not fit, or that use the room of one that does."""
    if prediction.fits is None:
        return ()
    if prediction.fits:
        return tuple(_fastest_first(_using_room(spec, prediction, predict), prediction))[:MOST]
    from llmtop.profiler.memory.waysout import ways_out  # no start of a run that fits waits for it

    return ways_out(spec, prediction, predict)


def _fastest_first(found: Iterator[Suggestion], now: Prediction) -> list[Suggestion]:
    """By what they gain; those that gain nothing are no use. Where no speed is predicted, as they came."""
    rate = now.tokens_per_second or 0.0
    gaining = [
        s for s in found if s.tokens_per_second is None or s.tokens_per_second > rate * (1 + SMALLEST_GAIN)
    ]
    return sorted(gaining, key=lambda suggestion: -(suggestion.tokens_per_second or 0.0))


class _Room:
    """Single changes of a run that fits, as far as they fit too."""

    def __init__(self, spec: RunSpec, now: Prediction, predict: Predict) -> None:
        self._spec = spec
        self._now = now
        self._predict = predict

    def with_change(self, change: Change, words: str, cost: str = "") -> Suggestion | None:
        """None where it does not fit or cannot run."""
        changed = allowed(self._spec, change)
        then = None if changed is None else self._predict(changed)
        if then is None or not then.fits:
            return None
        return suggestion((Step(change=change, words=words, cost=cost),), self._now, then)

    def recomputing_less(self) -> Suggestion | None:
        """No checkpointing where that fits; else that of the fewest layers."""
        before = self._spec.options.checkpointing_every
        none: Change = {"gradient_checkpointing": False, "checkpointing_every": 1}
        changes: list[tuple[Change, int | None, str]] = [(none, None, "no checkpointing")]
        changes += [
            ({"checkpointing_every": every}, every, checkpointing(every))
            for every in (4, 2)
            if every > before
        ]
        for change, every, words in changes:
            less = 100 * (1 - compute(every) / compute(before))
            if (found := self.with_change(change, words, f"about {less:.0f}% less compute")) is not None:
                return found
        return None

    def larger_micro_batch(self) -> Suggestion | None:
        """The largest doubling."""
        larger, size = None, self._spec.options.micro_batch * 2
        while size <= 1024 and (found := self.with_change({"micro_batch": size}, f"micro-batch {size}")):
            larger, size = found, size * 2
        return larger


def _using_room(spec: RunSpec, prediction: Prediction, predict: Predict) -> Iterator[Suggestion]:
    options = spec.options
    if prediction.device_memory_bytes is None or spec.on_cpu:
        return
    room = _Room(spec, prediction, predict)
    found: list[Suggestion | None] = []
    if options.offload_param != "none" or options.offload_optimizer != "none":
        change: Change = {"offload_param": "none", "offload_optimizer": "none"}
        found.append(room.with_change(change, "no offload", "faster"))
    elif options.zero == 3:
        found.append(room.with_change({"zero": 2}, "ZeRO-2", "less traffic between GPUs"))
    if options.quantization != "none":
        packed: Change = {"quantization": "none"}
        found.append(room.with_change(packed, "weights that are not packed", "no unpacking in each pass"))
    if options.gradient_checkpointing:
        found.append(room.recomputing_less())
    found.append(room.larger_micro_batch())
    yield from (one for one in found if one is not None)

"""A change to a live run in words, before it is made: which keys, what is predicted, what it costs."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from llmtop.presets.cautions import cautions
from llmtop.profiler.changewords import value_words
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.fold.spans import measured_spans
from llmtop.profiler.hardware.hostmemory import host_memory_bytes
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.changeevents import KeyChange
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.units import format_bytes, format_seconds, format_tokens_rate
from llmtop.trainer.change.plan import ChangePlan, host_shortage, plan_change
from llmtop.trainer.change.price import Price, price_of
from llmtop.trainer.change.setwords import set_words

HOT, RELAUNCH = "between two steps", "by a relaunch"


class Misfit(Struct, frozen=True, kw_only=True):
    """Why a change is made only where a person says so a second time; false where it is made as it is."""

    fits: bool = True
    """Whether the devices have the memory, as far as that can be predicted."""
    host_shortage: str = ""
    """Of this machine's memory, in a sentence; empty for none."""

    def __bool__(self) -> bool:
        return not self.fits or bool(self.host_shortage)

    @property
    def words(self) -> str:
        """In few words; empty where there is nothing."""
        if not self.fits:
            return "does not fit"
        return "too little host memory" if self.host_shortage else ""

    def lines(self) -> Iterator[str]:
        """What the two predictions side by side do not tell."""
        if self.host_shortage:
            yield f"mind: {self.host_shortage}"


class Preview(Struct, frozen=True, kw_only=True):
    """What a person is shown before saying yes."""

    plan: ChangePlan
    price: Price
    measured_step_seconds: float | None = None
    """Of the setting in force."""
    measured_peak_bytes: int | None = None
    misfit: Misfit = Misfit()


class Side(Struct, frozen=True, kw_only=True):
    """One setting of a preview, for `--json`."""

    fits: bool | None
    peak_allocated_bytes: int
    host_bytes: int
    step_seconds: float | None
    tokens_per_second: float | None
    measured_peak_bytes: int | None = None
    measured_step_seconds: float | None = None


def preview_change(run: RunDir, state: RunState, words: list[str], *, keep_global_batch: bool) -> Preview:
    """Raises UsageError for what cannot be."""
    plan = plan_change(run.spec(), run.prediction(), words, keep_global_batch=keep_global_batch)
    now = measured_spans(state)[-1]
    rank = state.first
    stages = {stage.stage: stage.seconds for stage in rank.stages if stage.seconds} if rank else {}
    return Preview(
        plan=plan,
        price=price_of(plan, stages, state.last_saved),
        measured_step_seconds=now.step_seconds,
        measured_peak_bytes=now.peak_bytes,
        misfit=misfit_of(plan),
    )


def misfit_of(plan: ChangePlan) -> Misfit:
    """Of a run of this machine."""
    return Misfit(
        fits=plan.new_prediction.fits is not False, host_shortage=host_shortage(plan, host_memory_bytes())
    )


def preview_lines(preview: Preview) -> Iterator[str]:
    plan, price = preview.plan, preview.price
    how = RELAUNCH if plan.restage else HOT
    yield f"the change is made {how}:" if plan.restage else f"the change is made {how}, without a pause:"
    yield from (f"  {line}" for line in change_lines(plan.changes, whole=plan.restage))
    yield "predicted, now and then:"
    measured = (preview.measured_peak_bytes, preview.measured_step_seconds)
    yield from (f"  {line}" for line in side_by_side(plan, *measured))
    yield from preview.misfit.lines()
    for lost in plan.lost:
        yield f"lost: {lost}"
    known = cautions(plan.old, launching=True)
    new = (one for one in cautions(plan.new, launching=True) if one not in known)
    yield from (f"mind: {set_words(one)}" for one in new)
    if plan.restage:
        yield _down_words(price)


def change_lines(changes: tuple[KeyChange, ...], *, whole: bool) -> Iterator[str]:
    """One line a key; where only some of them take a relaunch, which ones do."""
    width = max((len(change.key) for change in changes), default=0)
    for change in changes:
        notes = [RELAUNCH] if change.restage else []
        notes += ["would be made without one"] if whole and not change.restage else []
        notes += ["keeps the global batch"] if change.adapted else []
        note = f"  ({'; '.join(notes)})" if notes else ""
        yield f"{change.key:<{width}}  {value_words(change.old)} -> {value_words(change.new)}{note}"


def fit_words(fits: bool | None) -> str:
    return {True: "fits", False: "does not fit", None: "n/a"}[fits]


def needs_words(prediction: Prediction) -> str:
    """What a setting takes, in one sentence: memory of what there is, and the time of a step."""
    needed, there_is = format_bytes(prediction.needed_bytes), format_bytes(prediction.device_memory_bytes)
    speed = f"a step {format_seconds(prediction.step_seconds)}"
    if prediction.tokens_per_second is not None:
        speed += f", {format_tokens_rate(prediction.tokens_per_second)}"
    return f"needs up to {needed} of {there_is}, host {format_bytes(prediction.host_bytes)}; {speed}"


def side_by_side(
    plan: ChangePlan, measured_peak_bytes: int | None = None, measured_step_seconds: float | None = None
) -> Iterator[str]:
    """The old and the new setting as predicted, and the old one as `measured` in a run that goes on."""
    old, new = plan.old_prediction, plan.new_prediction
    per = "a rank" if plan.new.on_cpu else "per GPU"
    need = "needs in all" if plan.new.on_cpu else "needs per GPU"
    peak = format_bytes(measured_peak_bytes) if measured_peak_bytes else ""
    rows = [
        (f"peak {per}", _bytes(old), _bytes(new), peak),
        (need, format_bytes(old.needed_bytes), format_bytes(new.needed_bytes), ""),
        ("host memory", format_bytes(old.host_bytes), format_bytes(new.host_bytes), ""),
        ("verdict", fit_words(old.fits), fit_words(new.fits), ""),
        (
            "step time",
            format_seconds(old.step_seconds),
            format_seconds(new.step_seconds),
            format_seconds(measured_step_seconds) if measured_step_seconds else "",
        ),
    ]
    for name, now, then, seen in rows:
        line = f"{name:<13} {now:>12}  {then:>12}"
        yield f"{line}   measured so far {seen}" if seen else line


def _bytes(prediction: Prediction) -> str:
    return format_bytes(prediction.peak_allocated_bytes)


def _down_words(price: Price) -> str:
    if price.down_seconds is None:
        return "down for: not known, as no start-up of this run was measured yet"
    return f"down for about {format_seconds(price.down_seconds)}: {_price_words(price)}"


def _price_words(price: Price) -> str:
    how = "at the rate of its last checkpoint" if price.measured else "at 1 GB/s, as it has not saved yet"
    return f"the start-up of this run, and {format_bytes(price.state_bytes)} saved and read {how}"


def sides(preview: Preview) -> tuple[Side, Side]:
    """Now and then."""
    now = _side(preview.plan.old_prediction, preview.measured_peak_bytes, preview.measured_step_seconds)
    return now, _side(preview.plan.new_prediction)


def _side(prediction: Prediction, peak: int | None = None, seconds: float | None = None) -> Side:
    return Side(
        fits=prediction.fits,
        peak_allocated_bytes=prediction.peak_allocated_bytes,
        host_bytes=prediction.host_bytes,
        step_seconds=prediction.step_seconds,
        tokens_per_second=prediction.tokens_per_second,
        measured_peak_bytes=peak,
        measured_step_seconds=seconds,
    )

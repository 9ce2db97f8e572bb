"""Predicted against actual memory, component by component, for the rank that held the most.

The actual peak is what the allocator (CUDA) or the kernel (CPU: resident set) reported inside a phase
of a step. On the CPU kind that is of the steps in which a rank kept no freed memory, so it is what was in
use; what its process held beyond it in any other step is `fragmentation`, outside the peak as on CUDA.
On CUDA the allocator's trace of a step tells what the peak itself held (`PeakClassified`): then
the components are exact, and `unexplained` is what nobody recognised and what the peak of the whole run has
beyond the traced one.
Without that, as on the CPU kind, tensors are classified only at some moments, and the components are those of
the classified moment nearest to the peak: of the moments at the borders of its phase, the one that held the
most. What the peak held beyond that moment came and went inside the phase: `workspace`. What that moment held
beyond its classified tensors (and, on the CPU kind, beyond the runtime) is `unexplained`, which may be
negative. So the rows inside the peak add up to it exactly.
After a change between two steps the process keeps what the setting before had freed, so its resident set
tells no peak of the new one: the peak is then what was in use at the classified moments, `peak_is_seen`.
A process whose tensors are much larger than its resident set had pages taken by the kernel: then neither
its peak nor what is left of it says anything about the prediction, and the breakdown is `reclaimed`.
On CUDA the rows outside the allocator add up, with the peak, to what NVML read of the device.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.spec import RunSpec
from llmtop.profiler.fold.rankstate import RankState
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.localrank import local_index
from llmtop.profiler.memory.allocator import outside_parts
from llmtop.profiler.memory.result import Component, Moment, Prediction
from llmtop.profiler.outside import outside_peak_parts
from llmtop.profiler.record.events import UNREAD_STEPS, MemoryClassified, PeakClassified, PhaseMemory
from llmtop.profiler.units import format_bytes

NEAR_PHASE: dict[str, tuple[Moment, ...]] = {
    "data": (Moment.STEADY,),
    "forward": (Moment.FORWARD_END,),
    "backward": (
        Moment.FORWARD_END,
        Moment.LOSS_BACKWARD,
        Moment.LAST_BLOCK_BACKWARD,
        Moment.FIRST_BLOCK_BACKWARD,
    ),
    "optimizer": (Moment.OPTIMIZER_STEP, Moment.STEADY),
}
"""Phase of a step to the moments that lie in it."""
_PHASES = ("forward", "backward", "optimizer")
_CLASSIFIED = (
    Component.PARAMETERS,
    Component.GRADIENTS,
    Component.OPTIMIZER_STATE,
    Component.MASTER_PARAMETERS,
    Component.COMMUNICATION_BUFFERS,
)
"""Every classification looks for these, so one that is absent was zero."""
_AFTER_BACKWARD = (Moment.FIRST_BLOCK_BACKWARD, Moment.OPTIMIZER_STEP, Moment.STEADY)
"""Classified when the graph, and all it had saved, is gone."""
_GONE_AFTER_BACKWARD = (Component.ACTIVATIONS, Component.LOGITS)
_ON_DEVICE = (
    Component.CUDA_CONTEXT,
    Component.NCCL,
    Component.LOADED_KERNELS,
    Component.OTHER_PROCESSES,
)
_IN_CONTEXT = (Component.NCCL, Component.LOADED_KERNELS)
"""Part of what was measured as the context, where only that is known."""
NEARLY = 0.98
RECLAIMED_SHARE = 0.05
"""Of the peak; by less the classified tensors exceed the resident set when some were never touched."""


def outside_peak(*, kept_inside: bool) -> tuple[Component, ...]:
    """What the peak does not hold. Freed memory that is kept is inside only where a resident set could not be
    told from what is in use."""
    return _ON_DEVICE if kept_inside else (Component.FRAGMENTATION, *_ON_DEVICE)


class BreakdownRow(Struct, frozen=True, kw_only=True):
    component: Component
    predicted_bytes: int | None
    actual_bytes: int | None
    """None: not measured at the moment that is shown."""
    in_peak: bool = True
    """Part of the allocated (CPU: resident) peak; False for what lies outside the allocator."""

    @property
    def error_percent(self) -> float | None:
        """How far the prediction is above the actual bytes."""
        return error_percent(self.predicted_bytes, self.actual_bytes)


class Breakdown(Struct, frozen=True, kw_only=True):
    rows: tuple[BreakdownRow, ...]
    """In the order of `Component`; `unexplained` last."""
    predicted_peak_bytes: int | None
    """None where nothing is predicted: of a script that has not been seen yet."""
    actual_peak_bytes: int | None = None
    """None before the first step was measured."""
    unexplained_bytes: int | None = None
    predicted_moment: str = ""
    actual_moment: str | None = None
    """The moment of the peak, or the classified moment whose components are shown in its place."""
    exact: bool = False
    """The components are those of the peak itself."""
    largest_unnamed: tuple[int, ...] = ()
    """Sizes of the largest allocations that nobody recognised, where the peak was traced."""
    peak_rank: int | None = None
    peak_phase: str | None = None
    """Phase of a step in which the peak was reached."""
    predicted_device_bytes: int | None = None
    actual_device_bytes: int | None = None
    """NVML's largest reading of that rank's device; None on the CPU kind."""
    reserved_bytes: int | None = None
    """Largest that rank's allocator held; None on the CPU kind."""
    peak_is_seen: bool = False
    """The peak is what was in use at the classified moment that held the most (CPU kind): the process keeps
    what the setting before had freed, and between two moments nothing tells what this one uses."""
    not_yet: str = ""
    """Why nothing is measured, where the run was changed just now; and what was before."""
    reclaimed: bool = False
    """The kernel had taken pages of that rank's process (CPU kind): the actual figures are too small."""

    @property
    def error_percent(self) -> float | None:
        return error_percent(self.predicted_peak_bytes, self.actual_peak_bytes)

    @property
    def unexplained_percent(self) -> float | None:
        """Of the actual peak; None where that peak is not all that the run held."""
        if self.unexplained_bytes is None or not self.actual_peak_bytes or self.reclaimed:
            return None
        return 100 * self.unexplained_bytes / self.actual_peak_bytes


def error_percent(predicted: int | None, actual: int | None) -> float | None:
    """How far `predicted` lies above `actual`; None where a ratio says nothing."""
    if predicted is None or not actual:
        return None
    return 100 * (predicted - actual) / actual


def breakdown(state: RunState, spec: RunSpec, prediction: Prediction) -> Breakdown:
    """Compare. Before anything was measured only the predicted side is filled."""
    rank, phase, peak = _largest_peak(state, spec)
    kept_inside = spec.on_cpu and rank is not None and _keeps_inside(rank)
    traced = None if rank is None or spec.on_cpu else rank.peaks_classified.get(phase or "")
    seen = None if rank is None or traced else _nearest(rank, phase, prediction.peak_moment)
    predicted = _predicted(spec, prediction, seen, phase)
    actual = _traced(traced) if traced else _at_moment(spec, rank, seen, peak)
    unexplained = None if peak is None else peak - sum(actual.values())
    reserved = None if rank is None or spec.on_cpu else _reserved(rank)
    device = None if rank is None or spec.on_cpu else _device_peak(state, spec, rank.rank)
    if rank is not None and peak is not None and not spec.on_cpu:
        outside = outside_peak_parts(rank, peak, reserved, device)
        actual.update(outside.components)
        device = outside.device_bytes
    is_seen = rank is not None and rank.tells_no_peak and spec.on_cpu
    if rank is not None and peak is not None and spec.on_cpu and not kept_inside and not is_seen:
        actual[Component.FRAGMENTATION] = max(0, process_peaks(state, spec).get(rank.rank, 0) - peak)
    shown = traced or seen
    outside_rows = outside_peak(kept_inside=kept_inside)
    return Breakdown(
        rows=_rows(
            _with_one_context(predicted, actual) if prediction.is_known else None,
            actual,
            unexplained,
            outside_rows,
        ),
        predicted_peak_bytes=prediction.peak_allocated_bytes if prediction.is_known else None,
        actual_peak_bytes=peak,
        unexplained_bytes=unexplained,
        predicted_moment=prediction.peak_moment if prediction.is_known else "",
        actual_moment=shown.moment if shown else None,
        exact=traced is not None,
        largest_unnamed=traced.largest_unnamed if traced else (),
        peak_rank=rank.rank if rank else None,
        peak_phase=phase,
        predicted_device_bytes=prediction.peak_device_bytes,
        actual_device_bytes=device,
        reserved_bytes=reserved,
        peak_is_seen=is_seen,
        not_yet="" if rank is not None else _not_yet(state, spec),
        reclaimed=spec.on_cpu and _too_small(peak, unexplained),
    )


def _at_moment(
    spec: RunSpec, rank: RankState | None, seen: MemoryClassified | None, peak: int | None
) -> dict[Component, int]:
    """Components of a classified moment, and as workspace what the peak of its phase held beyond it."""
    if rank is None:
        return {}
    actual = _classified(seen, kept_inside=spec.on_cpu and _keeps_inside(rank))
    if spec.on_cpu and rank.baseline is not None and rank.baseline.rss_bytes is not None:
        actual[Component.RUNTIME] = rank.baseline.rss_bytes
    if rank.tells_no_peak:
        return actual
    if peak is not None and seen is not None and seen.total_bytes is not None:
        actual.setdefault(Component.WORKSPACE, max(0, peak - seen.total_bytes))
    return actual


def _traced(event: PeakClassified) -> dict[Component, int]:
    """Components of a traced peak. It names all that there was, so one that is absent was zero."""
    foreign = (*outside_peak(kept_inside=False), Component.RUNTIME, Component.UNEXPLAINED)
    words = {str(component): component for component in Component if component not in foreign}
    found = dict.fromkeys(words.values(), 0)
    found.update({words[name]: size for name, size in event.components.items() if name in words})
    return found


def process_peaks(state: RunState, spec: RunSpec) -> dict[int, int]:
    """Rank to the largest resident set of its process: samples may miss what a phase of a step reached."""
    peaks = dict(state.peak_rss_bytes)
    for number, rank in state.ranks.items() if spec.on_cpu else ():
        seen = [memory.peak_bytes for memory in rank.peaks.values() if memory.peak_bytes is not None]
        if seen:
            peaks[number] = max(peaks.get(number, 0), *seen)
    return peaks


def _too_small(peak: int | None, unexplained: int | None) -> bool:
    return peak is not None and unexplained is not None and unexplained < -RECLAIMED_SHARE * peak


def _rows(
    predicted: dict[Component, int] | None,
    actual: dict[Component, int],
    unexplained: int | None,
    outside: tuple[Component, ...],
) -> tuple[BreakdownRow, ...]:
    known = predicted or {}
    rows = [
        BreakdownRow(
            component=component,
            predicted_bytes=known.get(component, None if component in outside or predicted is None else 0),
            actual_bytes=actual.get(component),
            in_peak=component not in outside,
        )
        for component in Component
        if known.get(component) or actual.get(component)
    ]
    if unexplained is not None:
        rows.append(
            BreakdownRow(component=Component.UNEXPLAINED, predicted_bytes=None, actual_bytes=unexplained)
        )
    return tuple(rows)


def _with_one_context(predicted: dict[Component, int], actual: dict[Component, int]) -> dict[Component, int]:
    """The prediction cut as the measurement is: where that knows the context as one, its parts are in it."""
    if Component.CUDA_CONTEXT not in actual or any(part in actual for part in _IN_CONTEXT):
        return predicted
    whole = sum(predicted.get(component, 0) for component in (Component.CUDA_CONTEXT, *_IN_CONTEXT))
    kept = {component: size for component, size in predicted.items() if component not in _IN_CONTEXT}
    return {**kept, Component.CUDA_CONTEXT: whole}


def _at_peak(
    prediction: Prediction, seen: MemoryClassified | None, phase: str | None
) -> dict[Component, int]:
    """Components of the predicted peak, cut as the measurement is.

    Where the tensors were seen at another moment of the phase in which the peak is predicted, the components
    are those predicted for that moment, and what the peak holds beyond it is workspace on both sides.
    """
    moments = {moment.name: moment for moment in prediction.moments}
    peak = moments.get(prediction.peak_moment)
    if peak is None:
        return {}
    if seen is None:
        return dict(peak.components)
    other = next((moments[name] for name in moments if name == seen.moment), peak)
    if prediction.peak_moment not in NEAR_PHASE.get(phase or "", ()):
        return dict(peak.components)
    parts = dict(other.components)
    beyond = peak.total_bytes - other.total_bytes
    if beyond:
        parts[Component.WORKSPACE] = parts.get(Component.WORKSPACE, 0) + beyond
    return parts


def _predicted(
    spec: RunSpec, prediction: Prediction, seen: MemoryClassified | None, phase: str | None
) -> dict[Component, int]:
    parts = _at_peak(prediction, seen, phase)
    parts.pop(Component.UNEXPLAINED, None)
    if spec.on_cpu:
        parts[Component.FRAGMENTATION] = prediction.peak_reserved_bytes[0] - prediction.peak_allocated_bytes
        return parts
    if prediction.peak_device_bytes is None:
        return parts
    outside = outside_parts(spec)
    for component, size in outside.items():
        parts.setdefault(component, size)
    if not spec.options.optimizer.startswith("paged"):
        # A paged optimizer's states lie on the device outside the allocator too; they are not fragments.
        held = prediction.peak_device_bytes - sum(outside.values()) - prediction.peak_allocated_bytes
        parts.setdefault(Component.FRAGMENTATION, max(0, held))
    return parts


def _largest_peak(state: RunState, spec: RunSpec) -> tuple[RankState | None, str | None, int | None]:
    """The rank, its phase and its bytes at the largest peak of any rank; of what was in use where known."""
    best: tuple[RankState | None, str | None, int | None] = (None, None, None)
    for rank in state.ranks.values():
        in_use = rank.peaks_in_use if spec.on_cpu else {}
        if spec.on_cpu and rank.tells_no_peak:
            seen = rank.seen_in_use
            if seen is not None and seen[1] > (best[2] or -1):
                best = (rank, _phase_of(seen[0]), seen[1])
            continue
        for phase, peak in _by_phase(in_use or rank.peaks):
            if peak > (best[2] or -1):
                best = (rank, phase, peak)
    return best


def _phase_of(moment: str) -> str:
    """The phase that ended at a classified moment."""
    return next((phase for phase in _PHASES if moment in NEAR_PHASE[phase]), "data")


def _keeps_inside(rank: RankState) -> bool:
    """Whether freed memory that its process keeps is part of its peak (CPU kind): no step told it apart."""
    return not rank.peaks_in_use and not rank.tells_no_peak


def _not_yet(state: RunState, spec: RunSpec) -> str:
    """After a change, until the first step on the new setting is measured."""
    span, before = state.changes.spans[-1], _peak_before(state)
    if len(state.changes.spans) < 2 or before is None:
        return ""
    what = "in use" if spec.on_cpu else "allocated"
    return (
        f"changed from step {span.first_step:,} on, which is measured when it is over;"
        f" before it {format_bytes(before)} were {what} at most"
    )


def _peak_before(state: RunState) -> int | None:
    """Of the newest setting before the one in force of which one is known."""
    for span in reversed(state.changes.spans[:-1]):
        known = [rank.setting_peaks.get(span.setting) for rank in state.ranks.values()]
        if peaks := [peak for peak in known if peak is not None]:
            return max(peaks)
    return None


def _by_phase(peaks: dict[str, PhaseMemory]) -> Iterator[tuple[str, int]]:
    """What each phase reached; and the steps that were not read where that is clearly more."""
    known = {phase: memory.peak_bytes for phase, memory in peaks.items() if memory.peak_bytes is not None}
    unread = known.pop(UNREAD_STEPS, None)
    yield from known.items()
    # Two steps alike differ by little, and a phase is known more closely.
    if unread is not None and NEARLY * unread > max(known.values(), default=0):
        yield UNREAD_STEPS, unread


def _nearest(rank: RankState, phase: str | None, predicted: Moment) -> MemoryClassified | None:
    known, near = rank.classified, NEAR_PHASE.get(phase or "", ())
    if not _keeps_inside(rank):
        known = {moment: _in_use(event) for moment, event in known.items()}
    candidates = [known[moment] for moment in near if moment in known] or list(known.values())
    largest = max(candidates, key=_held, default=None)
    # A peak that is that of a moment has no other's components.
    likely = None if rank.tells_no_peak else known.get(predicted)
    # Where the moments hold nearly the same, the predicted one puts like beside like.
    if largest is not None and likely in candidates and _held(likely) >= NEARLY * _held(largest):
        return likely
    return largest


def _held(event: MemoryClassified | None) -> int:
    if event is None:
        return 0
    return sum(event.components.values()) if event.total_bytes is None else event.total_bytes


def _in_use(event: MemoryClassified) -> MemoryClassified:
    """Without what the heap kept at that moment: the peak holds nothing of it."""
    parts = dict(event.components)
    kept = parts.pop(Component.FRAGMENTATION, 0)
    total = None if event.total_bytes is None else event.total_bytes - kept
    return replace(event, components=parts, total_bytes=total)


def _classified(event: MemoryClassified | None, *, kept_inside: bool) -> dict[Component, int]:
    if event is None:
        return {}
    found = dict.fromkeys(_CLASSIFIED, 0)
    if event.moment in _AFTER_BACKWARD:
        found.update(dict.fromkeys(_GONE_AFTER_BACKWARD, 0))
    foreign = (*outside_peak(kept_inside=kept_inside), Component.UNEXPLAINED)
    words = {str(component): component for component in Component if component not in foreign}
    for name, size in event.components.items():
        # A word of a later version is part of what this one cannot explain.
        if name in words:
            found[words[name]] = size
    return found


def _reserved(rank: RankState) -> int | None:
    return max((m.reserved_bytes for m in rank.peaks.values() if m.reserved_bytes is not None), default=None)


def _device_peak(state: RunState, spec: RunSpec, rank: int) -> int | None:
    """The sampler lists the devices in the order in which the local ranks use them."""
    devices = state.hardware.devices if state.hardware else ()
    local = local_index(spec, state.ranks_here, rank)
    if local is None or local >= len(devices):
        return None
    return state.peak_device_bytes.get(devices[local].index)

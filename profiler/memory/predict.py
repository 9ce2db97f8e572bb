"""The prediction: a run spec in, itemised bytes out. Pure, without torch or a GPU."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.shape import param_count
from llmtop.profiler.cost.steptime import predict_step_seconds
from llmtop.profiler.memory import allocator
from llmtop.profiler.memory.assume import assumptions
from llmtop.profiler.memory.backward import pass_bytes
from llmtop.profiler.memory.bound import upper_bytes
from llmtop.profiler.memory.host import host_bytes
from llmtop.profiler.memory.lora import check_targets
from llmtop.profiler.memory.result import (
    Component,
    Moment,
    MomentBytes,
    Prediction,
    is_tight,
    moment_bytes,
)
from llmtop.profiler.memory.sizes import Sizes, sizes_of
from llmtop.profiler.memory.states import StateBytes, state_bytes, step_components
from llmtop.profiler.memory.suggest import suggestions
from llmtop.profiler.memory.tape.run import Taped, taped
from llmtop.profiler.memory.walk import bucket_bytes
from llmtop.profiler.units import format_bytes


def predict(spec: RunSpec) -> Prediction:
    """Predict memory and step time of a run. A call takes about 0.1 ms; suggestions are not part of it.

    What the allocator holds beyond what is allocated is an estimate here; `predict_closely` simulates it.
    Raises UsageError for LoRA targets that the model does not have: an adapter on nothing fits anywhere.
    """
    check_targets(spec)
    sizes = sizes_of(spec)
    return predict_counted(spec, sizes, state_bytes(spec, sizes), in_words=True)


def predict_closely(spec: RunSpec) -> Prediction:
    """The same with the allocator of the first steps simulated, tensor by tensor: what is reserved and what
    NVML will read. The verdict is `predict`'s, so that a sweep, a way to fit and a plan say the same. A call
    takes 10 to 100 ms. Raises as `predict` does."""
    prediction = predict(spec)
    found = simulated(spec, prediction)
    if found is None:
        return prediction
    peak, context = prediction.peak_allocated_bytes, _context(spec)
    likely = max(found.peak_reserved_bytes, peak)
    told = prediction.assumptions
    if prediction.fits and found.missing_bytes:
        told = (_in_pieces(found.missing_bytes), *told)
    return replace(
        prediction,
        peak_reserved_bytes=allocator.reserved_range(
            likely, peak, _room(spec, peak, context), allocator.SIMULATED
        ),
        peak_device_bytes=likely + context,
        assumptions=told,
    )


def simulated(spec: RunSpec, prediction: Prediction) -> Taped | None:
    """The first steps on the run's device; None where the order of its allocations is not known."""
    if spec.on_cpu:
        return None
    return taped(spec, _room(spec, prediction.peak_allocated_bytes, _context(spec)))


def _context(spec: RunSpec) -> int:
    """Beside the allocator."""
    return allocator.context_bytes(spec) + state_bytes(spec, sizes_of(spec)).outside_allocator


IN_PIECES = "what is free on the device may lie in pieces"
"""Begins what is told where the allocator, simulated, finds no room in what it holds and cannot give back."""


def _in_pieces(missing_bytes: int) -> str:
    return (
        f"{IN_PIECES}: simulated, the allocator asks for"
        f" {format_bytes(missing_bytes)} more than there is; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        " avoids that"
    )


class Brief(Struct, frozen=True, kw_only=True):
    """The few figures of a prediction by which candidates are compared."""

    fits: bool | None
    peak_allocated_bytes: int
    needed_bytes: int | None
    device_memory_bytes: int | None
    host_bytes: int
    """Of one node."""
    step_seconds: float | None
    tokens_per_second: float | None

    @property
    def tight(self) -> bool:
        """Whether it fits with hardly anything to spare."""
        return is_tight(self.fits, self.needed_bytes, self.device_memory_bytes)


def predict_brief(spec: RunSpec) -> Brief:
    """The same figures as `predict` has, and no others: for a search, in two thirds of the time."""
    check_targets(spec)
    if not spec.on_cpu:
        return _cuda_brief(spec)
    sizes = sizes_of(spec)
    whole = predict_counted(spec, sizes, state_bytes(spec, sizes), in_words=False)
    return Brief(**{name: getattr(whole, name) for name in Brief.__struct_fields__})


def predict_counted(spec: RunSpec, sizes: Sizes, states: StateBytes, *, in_words: bool) -> Prediction:
    """The prediction from counts that are already taken."""
    if not spec.on_cpu:
        return _cuda_prediction(spec, sizes, states, in_words=in_words)
    from llmtop.profiler.memory.cpu import cpu_prediction  # most runs are on a GPU

    return cpu_prediction(spec, sizes, states, in_words=in_words)


def predict_with_suggestions(spec: RunSpec) -> Prediction:
    """The close prediction, with changes that would make the run fit or use its room; each tried one costs a
    quick call."""
    prediction = predict_closely(spec)
    return replace(prediction, suggestions=suggestions(spec, prediction, predict))


def moment_table(spec: RunSpec, sizes: Sizes, states: StateBytes) -> tuple[MomentBytes, ...]:
    """Bytes of each component at each moment, in the order of a step."""
    passes = pass_bytes(spec, sizes, states)
    return (
        moment_bytes(Moment.INIT, _init(states)),
        moment_bytes(Moment.FORWARD_END, passes.forward_end),
        moment_bytes(Moment.LOSS_BACKWARD, passes.loss_backward),
        moment_bytes(Moment.LAST_BLOCK_BACKWARD, passes.last_block),
        moment_bytes(Moment.FIRST_BLOCK_BACKWARD, passes.first_block),
        moment_bytes(Moment.OPTIMIZER_STEP, _optimizer_step(states)),
        moment_bytes(Moment.STEADY, _steady(states)),
    )


def _init(states: StateBytes) -> dict[Component, int]:
    parameters = states.parameters + states.secondary
    held = parameters + states.master
    return {
        Component.PARAMETERS: parameters,
        Component.MASTER_PARAMETERS: states.master,
        Component.WORKSPACE: max(0, states.init_peak - held),
    }


def _steady(states: StateBytes) -> dict[Component, int]:
    return {
        Component.PARAMETERS: states.parameters,
        Component.GRADIENTS: states.gradients_resident,
        Component.OPTIMIZER_STATE: states.optimizer,
        Component.MASTER_PARAMETERS: states.master,
        Component.COMMUNICATION_BUFFERS: states.bucket_resident,
        Component.WORKSPACE: states.workspace + states.scales,
    }


def _optimizer_step(states: StateBytes) -> dict[Component, int]:
    components = _steady(states)
    components[Component.GRADIENTS], components[Component.WORKSPACE] = step_components(states)
    components[Component.PARAMETERS] += states.secondary
    return components


class _Need(Struct, frozen=True):
    """What the verdict is taken from."""

    largest: MomentBytes
    upper: int
    """Of what is allocated."""
    context: int
    """Beside the allocator."""


def _need(spec: RunSpec, sizes: Sizes, states: StateBytes, moments: tuple[MomentBytes, ...]) -> _Need:
    steady = moments[1:]  # the first moment passes before the loop that the peak is read over
    largest = max(steady, key=lambda moment: moment.total_bytes)
    upper = upper_bytes(spec, sizes, largest.total_bytes, moments[0].total_bytes)
    return _Need(largest, upper, allocator.context_bytes(spec) + states.outside_allocator)


def _room(spec: RunSpec, peak: int, context: int) -> int | None:
    """What the device leaves to the allocator, which gives cached blocks back before it fails."""
    memory = spec.gpu.memory_bytes
    return None if memory is None else max(peak, memory - context)


def _cuda_brief(spec: RunSpec) -> Brief:
    sizes = sizes_of(spec)
    states = state_bytes(spec, sizes)
    need = _need(spec, sizes, states, moment_table(spec, sizes, states))
    needed, memory = need.upper + need.context, spec.gpu.memory_bytes
    seconds = predict_step_seconds(spec, sizes)
    return Brief(
        fits=None if memory is None else needed <= memory,
        peak_allocated_bytes=need.largest.total_bytes,
        needed_bytes=needed,
        device_memory_bytes=memory,
        host_bytes=host_bytes(spec, sizes).total_bytes,
        step_seconds=seconds,
        tokens_per_second=spec.tokens_per_step / seconds if seconds else None,
    )


def _cuda_prediction(spec: RunSpec, sizes: Sizes, states: StateBytes, *, in_words: bool) -> Prediction:
    moments = moment_table(spec, sizes, states)
    need = _need(spec, sizes, states, moments)
    largest, upper, context = need.largest, need.upper, need.context
    peak = largest.total_bytes
    memory = spec.gpu.memory_bytes
    room = _room(spec, peak, context)
    reserved = allocator.likely_reserved(moments, room)
    host = host_bytes(spec, sizes)
    needed = upper + context
    seconds = predict_step_seconds(spec, sizes)
    return Prediction(
        params=param_count(spec.model),
        trainable_params=sizes.trainable,
        fits=None if memory is None else needed <= memory,
        peak_allocated_bytes=peak,
        peak_allocated_upper_bytes=upper,
        peak_reserved_bytes=allocator.reserved_range(reserved, peak, room),
        peak_device_bytes=reserved + context,
        host_bytes=host.total_bytes,
        pinned_bytes=host.pinned_bytes,
        nvme_bytes=host.nvme_bytes,
        step_seconds=seconds,
        tokens_per_second=spec.tokens_per_step / seconds if seconds else None,
        moments=moments,
        peak_moment=largest.name,
        host=host,
        device_memory_bytes=memory,
        needed_bytes=needed,
        assumptions=assumptions(spec, sizes, bucket_bytes(spec, sizes)) if in_words else (),
    )

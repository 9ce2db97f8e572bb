"""The vocabulary that prediction and measurement share, and the prediction that `plan --json` prints."""

from enum import StrEnum

from msgspec import Struct

from llmtop.profiler.units import format_bytes

PREDICTION_SCHEMA_VERSION = 1


class Component(StrEnum):
    """Where a byte belongs. The same words name predicted and measured bytes."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    MASTER_PARAMETERS = "master_parameters"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    COMMUNICATION_BUFFERS = "communication_buffers"
    WORKSPACE = "workspace"
    """Temporaries: cuBLAS workspaces, optimizer copies inside the step, recompute transients."""
    ROUNDING = "rounding"
    """Allocated beyond what was asked for: the ends of the allocator's blocks. Measured only."""
    FRAGMENTATION = "fragmentation"
    """Reserved by the allocator and not allocated."""
    CUDA_CONTEXT = "cuda_context"
    """On the device outside the allocator: context, and where they are not told apart loaded kernels and
    NCCL too."""
    NCCL = "nccl"
    """Buffers of the process group, by difference. Measured only."""
    LOADED_KERNELS = "loaded_kernels"
    """Code that came to the device after the process group, and managed memory of paged optimizers, by
    difference. Measured only."""
    RUNTIME = "runtime"
    """CPU kind only: the interpreter, torch and its libraries in a rank's process."""
    OTHER_PROCESSES = "other_processes"
    UNEXPLAINED = "unexplained"


class Moment(StrEnum):
    """The moments of a run at which a peak can lie, in the order of a step."""

    INIT = "init"
    FORWARD_END = "end_of_forward"
    LOSS_BACKWARD = "loss_backward"
    LAST_BLOCK_BACKWARD = "last_block_backward"
    FIRST_BLOCK_BACKWARD = "first_block_backward"
    OPTIMIZER_STEP = "optimizer_step"
    STEADY = "between_steps"


MOMENT_WORDS: dict[str, str] = {
    Moment.INIT: "start of the run",
    Moment.FORWARD_END: "end of forward",
    Moment.LOSS_BACKWARD: "backward of the loss",
    Moment.LAST_BLOCK_BACKWARD: "backward of the last block",
    Moment.FIRST_BLOCK_BACKWARD: "backward of the first block",
    Moment.OPTIMIZER_STEP: "optimizer step",
    Moment.STEADY: "between steps",
}
"""A moment as people write it."""


class MomentBytes(Struct, frozen=True, kw_only=True):
    """Bytes on one GPU (the largest rank) at one moment; components of zero are left out."""

    name: Moment
    components: dict[Component, int]
    total_bytes: int


def moment_bytes(name: Moment, components: dict[Component, int]) -> MomentBytes:
    """A moment with its total; components of zero are left out."""
    present = {component: size for component, size in components.items() if size}
    return MomentBytes(name=name, components=present, total_bytes=sum(present.values()))


class HostBytes(Struct, frozen=True, kw_only=True):
    """Host memory of one node."""

    total_bytes: int
    pinned_bytes: int
    nvme_bytes: int
    components: dict[str, int]


class Suggestion(Struct, frozen=True, kw_only=True):
    """One way, of a single change or of several together: the fastest come first, other trainings last."""

    change: dict[str, object]
    """Option name to its new value: what `--set` or the plan screen would apply."""
    text: str
    """In words, with what it costs."""
    peak_allocated_bytes: int
    fits: bool | None
    tight: bool = False
    """Whether it fits with hardly anything to spare, by the rule of the prediction's own verdict."""
    tokens_per_second: float | None = None
    needed_bytes: int | None = None
    """What its verdict compares with the memory, as in the prediction. None in those of older versions."""
    host_bytes: int | None = None
    """Host memory of one node, of a change that moves something there; None for others."""

    @property
    def words(self) -> str:
        """The text, with the host memory that it takes."""
        return self.text if self.host_bytes is None else f"{self.text}; {self.host_words}"

    @property
    def host_words(self) -> str:
        """Empty where it takes none."""
        return "" if self.host_bytes is None else f"host memory {format_bytes(self.host_bytes)}"


TIGHT_SHARE = 0.95
"""Of the memory: a need above this fits on paper, and a display, another process or an odd batch tips it."""


def is_tight(fits: bool | None, needed_bytes: int | None, device_memory_bytes: int | None) -> bool:
    """Whether a run fits with hardly anything to spare: needed > `TIGHT_SHARE` x there is."""
    if not fits or needed_bytes is None or device_memory_bytes is None:
        return False
    return needed_bytes > TIGHT_SHARE * device_memory_bytes


def is_short(need_bytes: int | None, limit_bytes: int | None) -> bool:
    """Whether both are known and there is too little."""
    return need_bytes is not None and limit_bytes is not None and need_bytes > limit_bytes


def short_words(need_bytes: int, limit_bytes: int | None) -> str:
    """Of a host whose memory `is_short`."""
    return (
        f"it needs {format_bytes(need_bytes)} of host memory, and there is {format_bytes(limit_bytes)} here"
    )


class Prediction(Struct, frozen=True, kw_only=True):
    """The answer of `plan --json`. Bytes are integers; what is not known is None."""

    schema_version: int = PREDICTION_SCHEMA_VERSION
    params: int
    trainable_params: int
    fits: bool | None
    peak_allocated_bytes: int
    peak_allocated_upper_bytes: int
    peak_reserved_bytes: tuple[int, int]
    peak_device_bytes: int | None
    host_bytes: int
    pinned_bytes: int
    nvme_bytes: int
    step_seconds: float | None
    tokens_per_second: float | None
    moments: tuple[MomentBytes, ...]
    peak_moment: Moment
    host: HostBytes
    device_memory_bytes: int | None
    """What the verdict was taken against: the GPU's memory, or on the CPU kind the machine's."""
    needed_bytes: int | None = None
    """What the verdict compares with it: the upper bound of allocated plus what lies outside the allocator
    (on the CPU kind the upper bound of all ranks). The allocator may hold more where there is room, and
    gives that back when there is not. None in predictions of older versions."""
    suggestions: tuple[Suggestion, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether anything was predicted: nothing is of a script that has not been seen yet."""
        return self.peak_allocated_bytes > 0

    @property
    def tight(self) -> bool:
        """Whether it fits with hardly anything to spare."""
        return is_tight(self.fits, self.needed_bytes, self.device_memory_bytes)

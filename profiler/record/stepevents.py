"""What a rank tells of its optimizer steps.

Like the other events these are only added to: an optional field may be new, none changes its meaning.
"""

from msgspec import Struct, field

from llmtop.profiler.record.eventbase import Event


class PhaseMemory(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Memory at the end of a phase of a step."""

    allocated_bytes: int | None = None
    peak_bytes: int | None = None
    """Largest allocated inside the phase (CUDA), or the largest resident set (CPU)."""
    reserved_bytes: int | None = None


UNREAD_STEPS = "unread steps"
"""Beside the phases of a step whose memory was read: peaks of the steps since the reading before."""


BETWEEN = "between"
"""Beside the phases of a step of a script whose data loaders are watched: what it did between two steps other
than to load, which is `data` then. Where they are not, `data` is all of it."""

BEFORE_FORWARD = ("data", BETWEEN)
"""What a rank does alone before the forward pass of a step."""


class LeftOutSteps(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Steps that a thinned log does not hold, added up."""

    steps: int
    tokens: int = 0
    skipped: int = 0
    nonfinite: int = 0
    """Whose loss is not told: on the rank that tells it, those that were not finite."""
    first_nonfinite_step: int | None = None
    phase_seconds: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Phase to its seconds in the steps that measured it, and how many those were."""
    peaks: dict[str, PhaseMemory] = field(default_factory=dict)
    """Phase to the largest readings."""
    peaks_in_use: dict[str, PhaseMemory] = field(default_factory=dict)
    """The same of the steps that were `in_use_only`."""


class StepFinished(Event, frozen=True, kw_only=True, tag="step_finished"):
    """One optimizer step, counted from 1."""

    step: int
    loss: float | None = None
    """Mean over the step's tokens and ranks; None when it is not finite."""
    learning_rate: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    """fp16: the gradients overflowed and nothing was updated."""
    tokens: int = 0
    """Of the whole job in this step."""
    micro_batch: int = 1
    grad_accum: int = 1
    step_seconds: float = 0.0
    ended: float | None = None
    """Wall clock of its end on the device, where that is not when the line was written: a step is read
    while the next one is under way."""
    phase_seconds: dict[str, float | None] = field(default_factory=dict)
    """Keys are `Phase`; summed over the step's micro-batches. `BETWEEN` may be beside them. Empty for a step
    whose borders were not marked: on a GPU that takes time, and is done in one of five steps."""
    phase_memory: dict[str, PhaseMemory] = field(default_factory=dict)
    """By phase; empty for a step that was not read. `UNREAD_STEPS` may be beside the phases."""
    memory_every: int = 1
    """The memory of so many steps is read once: a reading takes time."""
    profiled: bool = False
    """Kernels were recorded in this step: its times are not those of a step, on any rank."""
    in_use_only: bool = False
    """CPU kind: freed memory left the process at once, so its resident set was what was in use. In other
    steps the heap keeps freed memory, which is resident too."""
    left_out: LeftOutSteps | None = None
    """In a log that was thinned: the steps between the one before and this one."""

"""Events of checkpoints: written, refused and read."""

from llmtop.profiler.record.eventbase import Event


class CheckpointSaved(Event, frozen=True, kw_only=True, tag="checkpoint_saved"):
    step: int
    path: str
    size_bytes: int
    seconds: float
    passing: bool = False
    """Made for a relaunch, and removed when that has made a step."""


class CheckpointRefused(Event, frozen=True, kw_only=True, tag="checkpoint_refused"):
    """A checkpoint could not be written; the training goes on."""

    step: int
    why: str
    passing: bool = False
    """Asked for by a relaunch, which is refused with it."""


class CheckpointLoaded(Event, frozen=True, kw_only=True, tag="checkpoint_loaded"):
    """The ranks go on from a checkpoint."""

    step: int
    path: str
    bytes_read: int
    """By this rank."""
    seconds: float
    zero: int
    """Stage of the run that wrote it."""
    world_size: int
    """Ranks that wrote it."""
    notes: tuple[str, ...] = ()
    """What is not exactly as it was saved."""

"""Events of a run over hosts: a host joins, is lost and found again, leaves; how its clock differs."""

from llmtop.profiler.record.eventbase import Event

# --- written by the lead, the supervisor on the launching machine ----------------------------------


class HostJoined(Event, frozen=True, kw_only=True, tag="host_joined"):
    """The supervisor of a host is up."""

    host: str
    """As the hostfile names it; so in all events."""
    pid: int
    first_rank: int
    ranks: int
    node: str = ""
    """What the machine calls itself."""


class HostLost(Event, frozen=True, kw_only=True, tag="host_lost"):
    """A host does not answer; its ranks may be going on."""

    host: str
    quiet_seconds: float
    reason: str = ""


class HostFound(Event, frozen=True, kw_only=True, tag="host_found"):
    """A host that was lost answers again."""

    host: str
    away_seconds: float


class HostLeft(Event, frozen=True, kw_only=True, tag="host_left"):
    """A host's part of the run is over."""

    host: str
    reason: str
    answered: bool = True
    """Whether it said so itself; a host that did not may still have ranks, until it ends them by itself."""
    was_there: bool = True
    """Whether anything of this start may have come to it: not to one that was never reached."""


class ClockMeasured(Event, frozen=True, kw_only=True, tag="clock_measured"):
    """How a host's clock differs, by the middle of the shortest of some round trips."""

    host: str
    offset_seconds: float
    """To be taken off a time stamp of the host to have the launching machine's time."""
    error_seconds: float
    """Half the round trip: the true offset is not farther away than this."""


# --- written by the supervisor of a host ----------------------------------------------------------


class OrderCarriedOut(Event, frozen=True, kw_only=True, tag="order_carried_out"):
    """What the lead ordered is done, or could not be."""

    number: int
    problem: str = ""
    """Why not; empty when it is done."""
    fix: str = ""
    port: int | None = None
    """Asked of the first host: a free port, for the ranks to meet at."""
    address: str = ""
    """And its address."""


class StandbyEnded(Event, frozen=True, kw_only=True, tag="standby_ended"):
    """A rank that was made ready for a relaunch has ended before it was one."""

    rank: int
    pid: int

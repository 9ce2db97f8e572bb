"""What every event carries, whoever wrote it.

Annotations of events, and of the structs in them, are evaluated where they stand and not put off: msgspec
would evaluate each by itself, in ten times the time, whenever a program that reads a record starts.
"""

from functools import lru_cache

from msgspec import Struct

EVENT_VERSION = 1
_MOST_DIGITS = 9
"""Of a rank's number: Python refuses to read one of thousands."""


class Event(Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True, gc=False):
    """What every line carries. The writer fills the stamps.

    Events hold no cycles. Without `gc=False` the collector would look at all of them again and again while a
    long log is read.
    """

    v: int = 0
    """Zero until the writer stamps it: defaults are left out of a line, and the version never may be."""
    t: float = 0.0
    m: float = 0.0
    src: str = ""


@lru_cache(maxsize=4096)
def rank_of(src: str) -> int | None:
    """The rank that wrote an event, from its `src`; None for the supervisor and the sampler."""
    number = src.removeprefix("rank")
    return int(number) if number != src and number.isdecimal() and len(number) <= _MOST_DIGITS else None

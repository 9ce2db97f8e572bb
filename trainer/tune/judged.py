"""All settings of a search, judged one way for whoever shows them or tries them."""

from __future__ import annotations

from llmtop.profiler.cost.calibration import with_calibration
from llmtop.profiler.hardware.hostmemory import host_memory_bytes
from llmtop.trainer.tune.journal import Asked
from llmtop.trainer.tune.lacking import lacking
from llmtop.trainer.tune.space import Space, space_of
from llmtop.trainer.tune.words import knobs_of


def judged(asked: Asked, *, here: bool, anew: bool = False) -> Space:
    """What varies as was asked, predicted with what `llmtop calibrate` has measured of the device.

    `here`: leave out what this machine has not got. `anew`: somebody asks now; a search that was begun goes
    on with words that are refused since. Raises UsageError for too many settings.
    """
    return space_of(
        with_calibration(asked.spec),
        knobs_of(asked.spec, asked.fix, asked.allow, anew=anew),
        host_memory_bytes=host_memory_bytes() if here else None,
        lacks=lacking() if here else lambda _: "",
    )

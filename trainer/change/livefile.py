"""What the supervisor asks of running ranks: one file in the run's folder, which each looks at after a step.

One change is under way at a time, so ranks that have seen a number have all seen the same.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from llmtop.profiler.record.askedfile import AskedFile
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.wholefile import write_atomic


class LiveRequest(Struct, frozen=True, kw_only=True):
    setting: int
    """Number of the setting to go over to."""
    leave: bool = False
    """Save and end after the step; the setting is taken by a relaunch."""
    folder: str = ""
    """Where to save then, from the run's folder on."""


def ask_ranks(run: RunDir, request: LiveRequest) -> None:
    write_atomic(run.live_path, msgspec.json.encode(request))


def forget_request(run: RunDir) -> None:
    """Before ranks are started: what the earlier ones were asked is not meant for them."""
    run.live_path.unlink(missing_ok=True)


class SaveRequest(Struct, frozen=True, kw_only=True):
    """A checkpoint after the step that the ranks are in; the training goes on."""

    number: int
    """Counted from 1 for each start of the ranks."""


def ask_to_save(run: RunDir, number: int) -> None:
    write_atomic(run.save_path, msgspec.json.encode(SaveRequest(number=number)))


def forget_saves(run: RunDir) -> None:
    """Before ranks are started, as `forget_request`."""
    run.save_path.unlink(missing_ok=True)


class LiveFile(AskedFile[LiveRequest]):
    def __init__(self, run: RunDir) -> None:
        super().__init__(run.live_path, LiveRequest)


class SaveFile(AskedFile[SaveRequest]):
    def __init__(self, run: RunDir) -> None:
        super().__init__(run.save_path, SaveRequest)

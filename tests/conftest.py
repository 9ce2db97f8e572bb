"""How property tests draw their examples: the same ones everywhere, so that a check says the same twice.

`pytest --hypothesis-profile explore` draws others each time, and more of them.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from itertools import zip_longest
from pathlib import Path

import pytest

# Under nohup a hang-up is ignored by all that is started, and an interrupt by what a shell script starts with
# `&`; tests of what these do need that they are not.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("hypothesis") is not None:
    # Without it the tests of a GPU machine still run.
    from hypothesis import settings

    # No deadline: how long an example takes is the machine's business.
    settings.register_profile("steady", derandomize=True, deadline=None)
    settings.register_profile("explore", derandomize=False, deadline=None, max_examples=500)
    settings.load_profile("steady")


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors: many tests wait for processes."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with real runs first, those that mostly wait for hosts between those that keep processors busy.

    Whoever runs several files at a time has the quick ones left at the end, and no long one alone.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    slow = [path for path, its in files.items() if any(item.get_closest_marker("slow") for item in its)]
    waiting = [path for path in slow if path.parent.name == "hosts"]
    busy = [path for path in slow if path not in waiting]
    between = [path for pair in zip_longest(busy, waiting) for path in pair if path is not None]
    order = [*between, *(path for path in files if path not in slow)]
    items[:] = [item for path in order for item in files[path]]


def pytest_collection_finish() -> None:
    """Threads of torch would wait for each other in turns with the processes that tests start."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)

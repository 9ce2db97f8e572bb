"""A run for a training that llmtop has not launched: an observer of its own is started for it."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from llmtop.profiler.record.scriptevents import HOOKED_RUN

_OBSERVE = "llmtop.trainer.script.observe"
"""Started by name: it is the host's side, which knows no torch."""


def begin_run() -> None:
    """Collective where a process group is up: every rank learns the folder of one new run.

    It is said in the environment, as `llmtop run` says it; where no run could be begun nothing is.
    """
    distributed = torch.distributed
    together = distributed.is_available() and distributed.is_initialized()
    found = [_observed() if not together or distributed.get_rank() == 0 else ""]
    if together:
        distributed.broadcast_object_list(found, src=0)
    if found[0]:
        os.environ[HOOKED_RUN] = found[0]


def _observed() -> str:
    """Folder of the run; empty where the observer did not start, which it has then said."""
    command = [sys.executable, "-P", "-m", _OBSERVE, str(os.getpid())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""

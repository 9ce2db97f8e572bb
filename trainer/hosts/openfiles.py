"""Room for the open files of many hosts: a process has as many as its shell allows, most often 1,024."""

from __future__ import annotations

import resource

from llmtop.presets.errors import LlmtopError

_FILES_A_HOST = 6
"""Its orders, and of a connection both directions and what ssh says; the rest while one is made."""
_OTHER_FILES = 256


def make_room(hosts: int) -> None:
    """Have this process, and what it starts, open as many as so many hosts take.

    Raises LlmtopError where the machine does not allow that.
    """
    needed = _OTHER_FILES + _FILES_A_HOST * hosts
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _is_enough(soft, needed):
        return
    if not _is_enough(hard, needed):
        raise LlmtopError(
            f"{hosts:,} hosts take {needed:,} open files",
            why=f"this machine allows a process {hard:,} of them",
            fix=f"raise the limit: LimitNOFILE or limits.conf, so that ulimit -Hn says {needed} or more",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _is_enough(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed

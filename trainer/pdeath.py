"""Ends this process when its parent dies, so that no rank outlives its supervisor."""

from __future__ import annotations

import ctypes
import os
import signal

SUPERVISOR_PID = "LLMTOP_SUPERVISOR_PID"
"""Who must be the parent of a rank; absent for a rank that a person starts by hand."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel for `death_signal` at the parent's death; leave now if the parent is already gone.

    The kernel watches the thread that forked this process, so the parent must start its children
    from a thread that lives as long as it does.
    """
    # An orphan that was adopted before this line has a live parent: only its supervisor knows better.
    parent = os.environ.get(SUPERVISOR_PID) or str(os.getppid())
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    # The parent may have died before the call took effect; the orphan then has another parent.
    if str(os.getppid()) != parent:
        os.kill(os.getpid(), death_signal)

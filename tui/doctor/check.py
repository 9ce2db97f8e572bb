"""What one look at the machine gives, and how all checks ask for an installed version."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Status = Literal["ok", "warn", "missing", "optional"]
"""`missing` stops training here; `optional` is not there, and only what its line names needs it."""

UNANSWERED = "see dmesg for NVRM: Xid; end what uses the GPUs, else restart the machine"
"""What to do about a driver that hangs."""


class Check(Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    mend: str = ""
    """What to do; empty when nothing needs doing."""


class Machine(Struct, frozen=True, kw_only=True):
    """What several checks depend on, looked up once. None: not there."""

    torch_version: str | None
    torch_cuda: str | None
    """CUDA version that torch was built for; None for a CPU build or without torch."""
    gpu_names: tuple[str, ...]
    driver_version: str | None
    driver_cuda: tuple[int, int] | None
    """Newest CUDA version that the driver runs."""
    driver_silent: bool = False
    """Whether there is a driver that does not answer."""

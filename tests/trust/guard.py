"""Python processes that are seen when they turn to another machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

GUARD = """
import os, sys
_HERE = ("127.", "::1", "localhost", "0.0.0.0")
def _seen(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        place = args[1] if len(args) > 1 else None
        host = place[0] if isinstance(place, tuple) and place else None
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if isinstance(host, str) and host and not host.startswith(_HERE) and host != os.uname().nodename:
        with open(os.environ["SENT_TO"], "a") as told:
            told.write(f"{event} {host} by {sys.argv}\\n")
        raise OSError("no network in this test")
sys.addaudithook(_seen)
"""
"""Sees every address that Python code of a process turns to, and that of the processes that it starts."""


def guarded_environment(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The same, in which Python's processes are looked at."""
    site = folder / "guard"
    site.mkdir()
    (site / "sitecustomize.py").write_text(GUARD)
    return {**environment, "PYTHONPATH": str(site), "SENT_TO": str(folder / "sent")}


def sent(environment: Mapping[str, str]) -> str:
    """Where they turned to."""
    told = Path(environment["SENT_TO"])
    return told.read_text() if told.exists() else ""

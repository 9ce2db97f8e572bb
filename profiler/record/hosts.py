"""The hosts of a run, `hosts.json`, and the part of each in the run's folder, `hosts/NAME`.

Whoever looks at one host opens its `HostDir` as any run's folder: it has the host's ranks alone, and the
files of the host's own supervisor.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from llmtop.presets.errors import LlmtopError
from llmtop.presets.foreign import read_json, why_unreadable
from llmtop.profiler.record.rundir import HARDWARE, SUPERVISOR, RunDir
from llmtop.profiler.record.segments import has_log
from llmtop.profiler.record.wholefile import document, write_atomic

Launcher = Literal["ssh", "pdsh", "srun"]
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@%+-]*")
LONGEST_HOST_NAME = 255
"""What a folder's name may have; DNS allows two fewer."""
HOSTS_FILE = "hosts.json"
_HOSTS = "hosts"


class Host(Struct, frozen=True, kw_only=True):
    """One machine of a run."""

    name: str
    """As the hostfile has it: what ssh is told to connect to."""
    first_rank: int
    """Of its ranks, which follow each other."""
    slots: tuple[int, ...]
    """Numbers of the devices that its ranks use, one a rank."""

    def __post_init__(self) -> None:
        # A record may be anybody's, and the name is that of a folder.
        if not is_host_name(self.name):
            raise ValueError(f"{self.name[:80]!r} is not the name of a host")

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + len(self.slots))


class Hosts(Struct, frozen=True, kw_only=True):
    """All machines of a run, in the order of their ranks."""

    version: int = 1
    hosts: tuple[Host, ...]
    launcher: Launcher = "ssh"
    choose_devices: bool = False
    """Whether a host's ranks are to see the devices of their slots alone."""
    python: str = ""
    """The interpreter on the hosts."""
    master_address: str = ""
    """Of the first host, where the ranks meet; empty: as that host tells."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that were passed; their values are in no file."""

    @property
    def world_size(self) -> int:
        return sum(len(host.slots) for host in self.hosts)

    def host(self, name: str) -> Host | None:
        return next((host for host in self.hosts if host.name == name), None)

    def host_of(self, rank: int) -> Host | None:
        return next((host for host in self.hosts if rank in host.ranks), None)


def is_host_name(name: str) -> bool:
    """Whether a word can be a host: none that ssh would take for an option, or that is no folder's name."""
    return len(name) <= LONGEST_HOST_NAME and _NAME.fullmatch(name) is not None


class HostDir(RunDir):
    """A run's folder as the supervisor of one host sees it, and whoever looks at that host alone."""

    def __init__(self, path: Path, host: Host) -> None:
        super().__init__(path)
        self.host = host
        self.ranks_here = host.ranks
        self.own_path = path / _HOSTS / host.name
        """Files that no other host writes."""

    def events_path(self, src: str | int) -> Path:
        """As of any run; the supervisor's and the sampler's are the host's own."""
        return self.own_path / f"{src}.jsonl" if src in (SUPERVISOR, HARDWARE) else super().events_path(src)

    def log_path(self, rank: int | str) -> Path:
        return self.own_path / f"{SUPERVISOR}.log" if rank == SUPERVISOR else super().log_path(rank)

    def rank_events(self) -> dict[int, Path]:
        """Of this host's ranks."""
        paths = {rank: self.events_path(rank) for rank in self.host.ranks}
        return {rank: path for rank, path in paths.items() if has_log(path)}

    @property
    def bookmark_path(self) -> Path:
        return self.own_path / "bookmark"

    @property
    def supervisor_pid_path(self) -> Path:
        return self.own_path / "supervisor.pid"

    @property
    def summary_path(self) -> Path:
        """The host's ranks, folded, from time to time."""
        return self.own_path / "summary.jsonl"

    @property
    def orders_path(self) -> Path:
        """What the lead tells this host to do."""
        return self.own_path / "orders.jsonl"

    @property
    def beat_path(self) -> Path:
        """A sign of life that this host gives."""
        return self.own_path / "beat.json"


def lead_log(run: RunDir) -> Path:
    """Of what the lead tells, whichever part of the run is looked at."""
    return RunDir(run.path).events_path(SUPERVISOR)


def host_of_log(run: RunDir, log: Path) -> str:
    """The host whose folder a log lies in; empty for one of a rank or of the lead."""
    place = log.relative_to(run.path).parts
    return place[1] if len(place) == 3 and place[0] == _HOSTS else ""


def lead_beat_path(run: RunDir) -> Path:
    """A sign of life that the lead gives."""
    return run.path / "lead.json"


def write_hosts(run: RunDir, hosts: Hosts) -> None:
    write_atomic(run.path / HOSTS_FILE, document(hosts))


def read_hosts(run: RunDir) -> Hosts | None:
    """None for a run on one machine; raises LlmtopError for a damaged file."""
    path = run.path / HOSTS_FILE
    try:
        return read_json(path, Hosts)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise LlmtopError(
            f"cannot read {path}", why=why_unreadable(error), fix="launch the run again: this one is damaged"
        ) from error

"""How the lead reaches one host: over SSH, or through files of a folder that both have."""

from __future__ import annotations

from typing import Protocol

from llmtop.profiler.record.hosts import Host, HostDir, Hosts, lead_beat_path
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.trainer.hosts.beat import LeadBeat, SignClock, SignWatch
from llmtop.trainer.hosts.link import Clock, Link
from llmtop.trainer.hosts.ssh import link_command
from llmtop.trainer.hosts.twin import Kept, Twin

_DOCUMENTS = (
    *("hosts.json", "lead.json", "spec.json", "prediction.json", "deepspeed.json", "in-force.json"),
    *("live.json", "save.json", "snapshot.json", "settings/*/*.json", "standby/*/go"),
)

_HOST_LOGS = ("supervisor.log", "hardware*.jsonl", "summary*.jsonl")
_RANK_LOGS = ("rank-{}.jsonl", "rank-{}.*.jsonl", "rank-{}.log")
_LOOK_SECONDS, _LOOK_SECONDS_A_HOST = 0.1, 0.002
"""The lead looks for all hosts on one core: the more there are, the more seldom."""


class Transport(Protocol):
    @property
    def quiet_seconds(self) -> float:
        """Since the host was heard of."""
        ...

    @property
    def problem(self) -> str:
        """Why it is not, as far as that is known."""
        ...

    @property
    def unable(self) -> str:
        """Why a host that answers cannot keep what it is sent, as a full disk; empty where it can."""
        ...

    @property
    def clock(self) -> Clock | None: ...

    @property
    def started_pid(self) -> int | None:
        """Of the supervisor that was started there, if that is known."""
        ...

    @property
    def dead(self) -> str:
        """Why the host's supervisor is known to be gone; empty while it is not."""
        ...

    @property
    def supervisor_lives(self) -> bool | None:
        """None where that cannot be asked now."""
        ...

    def start(self) -> None: ...

    def ask_for_all(self) -> None:
        """Have everything fetched that the host has written by now."""
        ...

    @property
    def has_all(self) -> bool:
        """Whether that is done."""
        ...

    def close(self) -> None: ...


class OverSsh:
    """Starts the host's supervisor by itself, in the connection's own words."""

    def __init__(
        self,
        run: RunDir,
        host: Host,
        hosts: Hosts,
        *,
        mark: str,
        begin: int,
        folder: str,
        variables: dict[str, str],
    ) -> None:
        """`mark` is in the lead's sign of life; `begin` is where its orders begin in their file."""
        self._host = host
        place = HostDir(run.path, host)
        self._own = str(place.own_path.relative_to(run.path))
        opening = {
            "do": "open",
            "id": run.run_id,
            "path": str(run.path.resolve()),
            "mark": mark,
            "mark_in": lead_beat_path(run).name,
            "pid": f"{self._own}/{place.supervisor_pid_path.name}",
            "make": True,
        }
        self.link = Link(
            link_command(host.name, hosts.python),
            opening,
            Twin(run.path, self._kept()),
            look_seconds=max(_LOOK_SECONDS, len(hosts.hosts) * _LOOK_SECONDS_A_HOST),
        )
        module = "llmtop.trainer.hosts.supervise"
        self._spawn = {
            "do": "spawn",
            "command": [hosts.python, "-P", "-m", module, "{run}", host.name, str(begin)],
            "environment": variables,
            "folder": folder,
            "log": f"{self._own}/{SUPERVISOR}.log",
        }
        self._spawned = False
        self._wanted = 0

    def _kept(self) -> Kept:
        own = self._own
        return Kept(
            grow=(
                # Its own alone: what it has not any more goes here too.
                *(name.format(rank) for rank in self._host.ranks for name in _RANK_LOGS),
                *(f"stacks/rank-{rank}.txt" for rank in self._host.ranks),
                *(f"{own}/{name}" for name in _HOST_LOGS),
            ),
            # It says that ranks have ended, whose own last lines have to be here by then.
            last=(f"{own}/{SUPERVISOR}*.jsonl",),
            whole=(f"{own}/*.json", f"{own}/{SUPERVISOR}.pid", "standby/*/ready-*", "snapshots/*"),
            sent=_DOCUMENTS,
            appended=(f"{own}/orders.jsonl",),
        )

    @property
    def unable(self) -> str:
        return self.link.problem if self.link.opened else ""

    @property
    def quiet_seconds(self) -> float:
        return self.link.quiet_seconds

    @property
    def problem(self) -> str:
        return self.link.problem

    @property
    def clock(self) -> Clock | None:
        return self.link.clock

    @property
    def dead(self) -> str:
        if self.link.opened and self.link.ended_code is not None:
            return f"its supervisor ended with exit code {self.link.ended_code}"
        ours = self.link.supervisor_pid is not None and self.link.supervisor_pid == self.link.spawned_pid
        if self.link.opened and ours and self.link.alive is False:
            return "its supervisor is gone"
        return ""

    @property
    def started_pid(self) -> int | None:
        """Of the supervisor that was started last."""
        return self.link.spawned_pid

    @property
    def supervisor_lives(self) -> bool | None:
        """By the far end's newest word; what it has answered may be of before the supervisor had said who it
        is, which is long for a run that fails at once."""
        if not self.link.opened or not self.link.heard_pong:
            return None
        return self.link.holds_started or (self.link.alive is True and self.link.ended_code is None)

    def start(self) -> None:
        self.link.start()

    def start_supervisor(self) -> bool:
        """Once the connection stands; whether it was started now or before."""
        if self.link.opened and not self._spawned:
            self._spawned = True
            self.link.say(self._spawn)
        return self._spawned

    def ask_for_all(self) -> None:
        self._wanted = self.link.sync()

    @property
    def has_all(self) -> bool:
        return self.link.synced >= self._wanted

    def close(self) -> None:
        self.link.close()


class InFolder:
    """On a shared file system, where somebody else has started the host's supervisor: by its sign of life."""

    unable = ""
    started_pid = None
    problem = "its sign of life in the run's folder does not change"
    dead = ""
    has_all = True
    supervisor_lives = None

    def __init__(self, run: RunDir, host: Host, lead: LeadBeat) -> None:
        self._sign = SignWatch(HostDir(run.path, host).beat_path)
        self._clock = SignClock(lead)

    @property
    def quiet_seconds(self) -> float:
        seconds = self._sign.quiet_seconds()
        self._clock.see(self._sign.content)
        return seconds

    @property
    def clock(self) -> Clock | None:
        return self._clock.clock

    def start(self) -> None: ...

    def ask_for_all(self) -> None: ...

    def close(self) -> None: ...

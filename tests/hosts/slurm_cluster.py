"""A whole Slurm of one machine, for one test: its daemons, its keys and its files lie in one folder.

Two nodes with an slurmd each, at ports of their own. Needs root and Debian's slurmctld, slurmd and munge, of
which only the programs are used.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from tests.hosts.lab import wait_for

GPUS = 2
"""Of each node, as Slurm believes."""
MEMORY_MIB = 4096
"""Of each node, as Slurm believes."""
_CGROUPS = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "cpuset", "devices", "freezer")
_PLACES = "/usr/local/sbin:/usr/sbin:/sbin"
_DAEMONS = ("slurmctld", "slurmd", "munged")
_CLIENTS = ("srun", "sbatch", "sinfo", "scancel")


def program(name: str) -> str | None:
    """Daemons lie where a PATH may not lead."""
    return shutil.which(name) or shutil.which(name, path=_PLACES)


@cache
def why_not() -> str:
    """Why there can be no Slurm on this machine; empty where there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    missing = [name for name in (*_DAEMONS, *_CLIENTS) if program(name) is None]
    return f"{', '.join(missing)} not installed (slurmctld, slurmd, munge)" if missing else ""


class CannotStart(Exception):
    """Slurm is installed and its daemons do not run on this machine."""


class Cluster:
    def __init__(self, root: Path) -> None:
        self._root = root
        # Their cgroups are named after them.
        self.nodes = (f"n{os.getpid()}-1", f"n{os.getpid()}-2")
        self.has_cgroups = all(os.access(_CGROUPS / name, os.W_OK) for name in _CONTROLLERS)
        """Whether jobs are held to their memory and GPUs; else they are only told of them."""
        self._is_up = False
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._config = root / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """Of who calls Slurm: no word of an allocation that this machine may be in."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        return {**kept, "SLURM_CONF": str(self._config)}

    def start(self) -> Cluster:
        """Its daemons, until both nodes wait for work. Raises CannotStart."""
        try:
            self._write_files()
            self._start_munge()
            self._start("slurmctld", "-D", "-c", "-f", str(self._config))
            for name in self.nodes:
                self._start("slurmd", "-D", "-c", "-N", name, "-f", str(self._config))
            wait_for(lambda: self._is_idle() or self._has_ended(), self.told)
            if self._has_ended():
                raise CannotStart(self.told())
            self._is_up = True
        except OSError as error:
            self.close()
            raise CannotStart(str(error)) from error
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """With what they have started: steps live below a daemon of their own."""
        if self._is_up:
            self.call("scancel", f"--user={os.getuid()}")
            wait_for(lambda: self.call("squeue", "--noheader").stdout == "", self.told)
        mine = [one for one in psutil.process_iter() if self._started_here(one)]
        for process in mine:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(mine, timeout=10)
        for daemon in self._daemons:
            daemon.wait()
        for group in sorted(_CGROUPS.glob(f"*/slurm_n{os.getpid()}-*/**"), reverse=True):
            with suppress(OSError):  # where one is left, it is empty
                group.rmdir()

    def _started_here(self, process: psutil.Process) -> bool:
        try:
            found: dict[str, str] = process.environ()
        except psutil.Error:
            return False
        return found.get("SLURM_CONF") == str(self._config)

    def call(
        self, *words: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            env={**self.environment, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def has_no_job(self) -> bool:
        """As its controller answers; one that has no time says nothing, too."""
        listed = self.call("squeue", "--noheader")
        return listed.returncode == 0 and listed.stdout == ""

    def told(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self._root.glob("*.log"))

    def _has_ended(self) -> bool:
        return any(daemon.poll() is not None for daemon in self._daemons)

    def _is_idle(self) -> bool:
        return self.call("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(len(self.nodes))

    def _start(self, name: str, *words: str) -> None:
        path = program(name)
        assert path is not None
        node = words[words.index("-N") + 1] if "-N" in words else ""
        with (self._root / f"{name}{node}.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    [path, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment
                )
            )

    def _start_munge(self) -> None:
        """Credentials between the daemons and who calls them, with a key of this cluster alone."""
        folder = self._root / "munge"
        folder.mkdir(mode=0o700)
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={self._root / 'munge.socket'}",
            *(f"--{name}-file={folder / name}" for name in ("log", "pid", "seed")),
        )
        wait_for(lambda: (self._root / "munge.socket").exists() or self._has_ended(), self.told)

    def _write_files(self) -> None:
        for number in range(GPUS):
            # Of a major number that is left to experiments: no device of this machine is kept from a job.
            os.mknod(self._root / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(240, number))
        control, *ports = _free_ports(1 + len(self.nodes))
        nodes = "".join(
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port}"
            f" CPUs={os.cpu_count()} RealMemory={MEMORY_MIB} Gres=gpu:{GPUS}\n"
            for name, port in zip(self.nodes, ports, strict=True)
        )
        self._config.write_text(
            f"""ClusterName=llmtop-test
SlurmctldHost={socket.gethostname()}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={self._root / "munge.socket"}
CredType=cred/munge
StateSaveLocation={self._root / "state"}
SlurmdSpoolDir={self._root / "spool-%n"}
SlurmctldPidFile={self._root / "slurmctld.pid"}
SlurmdPidFile={self._root / "slurmd-%n.pid"}
ProctrackType=proctrack/{"cgroup" if self.has_cgroups else "linuxproc"}
TaskPlugin=task/{"cgroup,task/affinity" if self.has_cgroups else "none"}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
        )
        (self._root / "gres.conf").write_text(f"Name=gpu File={self._root}/gpu[0-{GPUS - 1}]\n")
        (self._root / "cgroup.conf").write_text("ConstrainRAMSpace=yes\nConstrainDevices=yes\n")
        for name in self.nodes:
            (self._root / f"spool-{name}").mkdir()
        (self._root / "state").mkdir()


def _free_ports(count: int) -> Sequence[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports

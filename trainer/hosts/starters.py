"""Starts the supervisors of all hosts at once, by a program that is there for it: srun, or pdsh.

Both need the run's folder on a file system that all hosts share: they carry no files. pdsh is GPL software
and no part of llmtop: it is called where it is installed and asked for.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from llmtop.presets.errors import UsageError
from llmtop.profiler.record.hosts import Hosts, Launcher
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.profiler.record.wholefile import write_atomic

_MODULE = "llmtop.trainer.hosts.supervise"
_VARIABLES = ".host-environment.json"
"""Hidden: it is in no archive, and goes to nobody who follows the run from another machine."""
_BASIC = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")
"""Variables that srun passes besides those that were named; SLURM_* it passes by itself."""
_END_SECONDS = 10.0


class Starter:
    """The program, which lives as long as what it has started."""

    def __init__(self, command: Sequence[str], log: Path, secrets: Path) -> None:
        self._name = Path(command[0]).name
        self._log = log
        self._secrets = secrets
        with log.open("ab") as output:
            self._began_at = output.tell()
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def problem(self) -> str:
        """Why what it was to start will not come; empty while it may."""
        code = self._process.poll()
        if code is None:
            return ""
        with self._log.open("rb") as file:
            file.seek(self._began_at)
            lines = file.read().decode(errors="replace").strip().splitlines()
        said = f"; it says: {' / '.join(lines[-3:])}" if lines else ""
        return f"{self._name} ended with exit code {code}{said}"

    def close(self) -> None:
        """What it started has left or was told to; the program itself must not stay."""
        self._secrets.unlink(missing_ok=True)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def require_launcher(launcher: Launcher) -> str:
    """Where the program is that starts the hosts. Raises UsageError where this machine has none."""
    program = shutil.which(launcher)
    if program is None:
        others = "" if launcher == "ssh" else "; --launcher ssh needs only OpenSSH"
        raise UsageError(
            f"{launcher} is not on the PATH",
            why="it starts the hosts of the run",
            fix=f"install it, or load its module{others}",
        )
    return program


def make_starter(run: RunDir, hosts: Hosts, begins: Sequence[int], variables: Mapping[str, str]) -> Starter:
    """Raises UsageError where the program is not there."""
    program = require_launcher(hosts.launcher)
    # Every host's orders begin at a place of its own; in a run that is new all are 0.
    begin = ",".join(map(str, begins))
    secrets = run.path / _VARIABLES
    write_atomic(secrets, msgspec.json.encode(dict(variables)), lasting=False)
    make = _srun if hosts.launcher == "srun" else _pdsh
    command = make(program, hosts, [hosts.python, "-P", "-m", _MODULE, str(run.path.resolve())], begin)
    return Starter(command, run.log_path(SUPERVISOR), secrets)


def _srun(program: str, hosts: Hosts, supervise: list[str], begin: str) -> list[str]:
    count = str(len(hosts.hosts))
    return [
        program,
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--nodelist=" + ",".join(host.name for host in hosts.hosts),
        "--distribution=block",
        # Since Slurm 22.05 a task would be bound to a core or two: the ranks below it need all of the job's.
        "--cpu-bind=none",
        # One host's end is the lead's to judge, and a signal to srun must not kill ranks that save.
        "--kill-on-bad-exit=0",
        "--export=" + ",".join(_BASIC),
        *supervise,
        "slurm",
        begin,
    ]


def _pdsh(program: str, hosts: Hosts, supervise: list[str], begin: str) -> list[str]:
    """As deepspeed 0.19.8 calls it (`launcher/multinode_runner.py`); `%h` is each host's name."""
    names = ",".join(host.name for host in hosts.hosts)
    return [program, "-S", "-R", "ssh", "-f", "1024", "-w", names, f"{shlex.join(supervise)} %h {begin}"]


def passed_variables(run_path: Path) -> dict[str, str]:
    """Those that a starter could not carry; nothing where ssh did, in its own channel."""
    try:
        return msgspec.json.decode((run_path / _VARIABLES).read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}

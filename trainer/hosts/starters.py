"""Starts the supervisors of all hosts at once, by a program that is there for it: srun, or pdsh.

Both need the run's folder on a file system that all hosts share: they carry no files. pdsh is GPL software
and no part of llmtop: it is called where it is installed and asked for.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from llmtop.presets.errors import UsageError
from llmtop.profiler.record.hosts import Hosts, Launcher
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.profiler.record.wholefile import write_atomic
from llmtop.trainer.hosts import slurm
from llmtop.trainer.hosts.ssh import OPTIONS, given_options
from llmtop.trainer.hosts.starterwords import Call, StarterWords, without_user

_MODULE = "llmtop.trainer.hosts.supervise"
_VARIABLES = ".host-environment.json"
"""Hidden: it is in no archive, and goes to nobody who follows the run from another machine."""
_BASIC = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")
"""Variables that srun passes besides those that were named; SLURM_* it passes by itself."""
_END_SECONDS = 10.0
_PDSH_SSH = "PDSH_SSH_ARGS_APPEND"
"""Further words for the ssh that pdsh calls."""


_WORDS_SECONDS = 1.0
"""What a host says may come after the word of its end."""


class Starter:
    """The program, which lives as long as what it has started."""

    def __init__(
        self,
        calls: Sequence[Call],
        log: Path,
        secrets: Path,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._secrets = secrets
        self._calls: dict[str, tuple[Call, psutil.Popen]] = {}
        """Host to what starts it, and its process."""
        self._processes: list[psutil.Popen] = []
        self._seen_at: dict[str, float] = {}
        """Host to when it was first seen to have ended."""
        with log.open("ab") as output:
            self._words = StarterWords(calls, log, output.tell())
            for call in calls:
                process = psutil.Popen(
                    list(call.command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env=dict(environment),
                )
                self._processes.append(process)
                self._calls.update(dict.fromkeys(call.hosts, (call, process)))

    def problem(self, host: str) -> str:
        """Why what it was to start on a host will not come; empty while it may."""
        call, process = self._calls[host]
        code = process.poll()
        told = self._told_of(call, host)
        if told or code is None:
            return told
        return f"{call.program} ended with exit code {code}{_says(self._words.newest())}"

    def _told_of(self, call: Call, host: str) -> str:
        how = self._words.how_ended(host)
        if not how:
            return ""
        own = self._words.of(host)
        seen_at = self._seen_at.setdefault(host, time.monotonic())
        if not own and time.monotonic() - seen_at < _WORDS_SECONDS:
            return ""
        return f"{call.program} says: {how}{_says(own)}"

    def close(self) -> None:
        """What it started has left or was told to; the program itself must not stay."""
        self._secrets.unlink(missing_ok=True)
        _, left = psutil.wait_procs(self._processes, timeout=_END_SECONDS)
        # With what is below it: the ssh processes of pdsh are each in a session of their own.
        below = [child for process in left for child in process.children(recursive=True)]
        for process in (*below, *left):
            _signalled(process.terminate)
        for process in psutil.wait_procs([*below, *left], timeout=_END_SECONDS)[1]:
            _signalled(process.kill)
        psutil.wait_procs(left)


def _signalled(send: Callable[[], None]) -> None:
    with suppress(psutil.NoSuchProcess):
        send()


def _says(words: str) -> str:
    return f"; it says: {words}" if words else ""


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
    supervise = [hosts.python, "-P", "-m", _MODULE, str(run.path.resolve())]
    if hosts.launcher == "pdsh":
        calls, environment = [_pdsh(program, hosts, supervise, begin)], {**os.environ, **_pdsh_variables()}
    else:
        environment = dict(os.environ)
        calls = list(_sruns(program, hosts, [*supervise, "slurm", begin], slurm.job_gpus(environment)))
    return Starter(calls, run.log_path(SUPERVISOR), secrets, environment)


def _sruns(program: str, hosts: Hosts, supervise: list[str], gpus: Mapping[str, int]) -> Iterator[Call]:
    """One step of all nodes; where the job has not as many GPUs on each, a step for each node.

    A step takes all of the job's GPUs only where it is asked for them: else what the job was asked for, a
    task or in all, counts anew for its one task a node. Of a job that has not as many on each node, only
    `--gpus` on a single node is taken (Slurm 22.05).
    """
    names = [host.name for host in hosts.hosts]
    counts = [gpus.get(name, 0) for name in names]
    together = len(set(counts)) == 1
    apart = [([name], count) for name, count in zip(names, counts, strict=True)]
    for group, count in [(names, counts[0])] if together else apart:
        words = [f"--gpus{'-per-node' if together else ''}={count}"] if count else []
        yield Call(command=(*_srun(program, group), *words, *supervise), hosts=tuple(group))


def _srun(program: str, names: Sequence[str]) -> list[str]:
    return [
        program,
        f"--nodes={len(names)}",
        f"--ntasks={len(names)}",
        "--ntasks-per-node=1",
        "--nodelist=" + ",".join(names),
        "--distribution=block",
        # llmtop may have been called in a step, which has all of the job: another would wait for its end.
        "--overlap",
        # Since Slurm 22.05 a task would be bound to a core or two: the ranks below it need all of the job's.
        "--cpu-bind=none",
        # One host's end is the lead's to judge, and a signal to srun must not kill ranks that save.
        "--kill-on-bad-exit=0",
        "--wait=0",
        # Each line that a task says begins with its number.
        "--label",
        "--export=" + ",".join(_BASIC),
    ]


def _pdsh(program: str, hosts: Hosts, supervise: list[str], begin: str) -> Call:
    """As deepspeed 0.19.8 calls it (`launcher/multinode_runner.py`); `%h` is each host's name.

    It sorts its hosts, so `%n` is not the number of a host. All of them are called at once: each stays until
    the run's end. Raises UsageError for names that it does not take, or not apart.
    """
    names = [host.name for host in hosts.hosts]
    for name in names:
        if ":" in name:
            raise UsageError(
                f"pdsh takes what is before the colon of {name} for a way to connect",
                fix="give it a name in ~/.ssh/config, or --launcher ssh",
            )
    if len({without_user(name) for name in names}) < len(names):
        raise UsageError(
            f"pdsh does not tell hosts apart by their users: {', '.join(names)}",
            fix="give each a name in ~/.ssh/config, or --launcher ssh",
        )
    remote = f"{shlex.join(supervise).replace('%', '%%')} %h {begin}"
    words = ("-S", "-R", "ssh", "-f", str(len(names)), "-w", ",".join(names), remote)
    return Call(command=(program, *words), hosts=tuple(names))


def _pdsh_variables() -> dict[str, str]:
    """Its ssh is called as our own is. Raises UsageError for words that pdsh would take apart."""
    words = [os.environ.get(_PDSH_SSH, ""), *given_options(), *(f"-o{option}" for option in OPTIONS)]
    spaced = next((word for word in words[1:] if len(word.split()) != 1), None)
    if spaced is not None:
        raise UsageError(
            f"pdsh cannot pass '{spaced}' to ssh",
            why="it takes words apart at spaces",
            fix="put it into ~/.ssh/config, or --launcher ssh",
        )
    return {_PDSH_SSH: " ".join(filter(None, words))}


def passed_variables(run_path: Path) -> dict[str, str]:
    """Those that a starter could not carry; nothing where ssh did, in its own channel."""
    try:
        return msgspec.json.decode((run_path / _VARIABLES).read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}

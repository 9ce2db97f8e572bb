"""Where each rank of a run stands now: its Python stacks, by py-spy or by what the rank itself can say.

py-spy sees every thread from outside and needs the right to trace (ptrace: the same user where the kernel's
`yama.ptrace_scope` is 0, else root or CAP_SYS_PTRACE). Where it is not there or not allowed, a rank is sent
SIGUSR2, for which `faulthandler` writes the stacks of all its threads, also while it hangs inside a call of
C. Only a process that is still the run's own rank and listens for that signal is sent it.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct

from llmtop.presets.errors import UsageError
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.record.hosts import read_hosts
from llmtop.profiler.record.processidentity import process_identity
from llmtop.profiler.record.remote import command_here, read_remote
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.segments import written_at
from llmtop.profiler.record.wholefile import write_atomic

PY_SPY_SECONDS = 20.0
OWN_SECONDS = 5.0
"""A rank answers at once, unless the kernel itself holds it."""
_LOOK_SECONDS = 0.02
_MOST_TOLD = 8
_SIGNAL = signal.SIGUSR2


class RankStacks(Struct, frozen=True, kw_only=True):
    rank: int
    pid: int | None
    way: str = ""
    """`py-spy` or `faulthandler`; empty where neither told."""
    text: str = ""
    why: str = ""
    """What went wrong on the way, in words."""


class Taken(Struct, frozen=True, kw_only=True):
    path: Path
    """The file in the run's folder that holds them."""
    ranks: tuple[RankStacks, ...]

    @property
    def text(self) -> str:
        return "\n".join(_section(each) for each in self.ranks)


def listen_for_stacks(run: RunDir, rank: int) -> None:
    """In a rank: from now on SIGUSR2 writes the stacks of all threads into the run's folder."""
    run.stacks_dir.mkdir(mode=0o700, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    # Never closed: the handler writes to it for as long as the process lives.
    descriptor = os.open(_own_path(run, rank), flags, 0o600)
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=True)


def take_stacks(run: RunDir, state: RunState, only: int | None = None) -> Taken:
    """Of every rank, or of one; they are written into the run's folder too.

    Raises UsageError for ranks of other machines, where only who is there can look.
    """
    if state.status in ENDED:
        raise UsageError(f"run {run.run_id} has no process to look at", why=f"it is over: {state.status}")
    pids = {number: rank.pid for number, rank in sorted(state.ranks.items()) if only in (None, number)}
    _require_here(run, pids)
    if not pids:
        raise UsageError(f"run {run.run_id} has started no rank yet", fix="wait a moment and ask again")
    with ThreadPoolExecutor(min(len(pids), 8)) as pool:
        found = tuple(pool.map(lambda item: _of_rank(run, *item), pids.items()))
    run.stacks_dir.mkdir(mode=0o700, exist_ok=True)
    path = run.stacks_dir / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.txt"
    taken = Taken(path=path, ranks=found)
    write_atomic(path, taken.text.encode())
    return taken


def _require_here(run: RunDir, pids: Mapping[int, int | None]) -> None:
    remote, hosts = read_remote(run.path), read_hosts(run)
    if remote is not None:
        raise UsageError(
            f"run {run.run_id} is on {remote.host}",
            why="stacks are taken where the ranks are",
            fix=f"take them there: {command_here(run.path, 'stacks')}",
        )
    if hosts is None:
        return
    places = [(rank, pid, hosts.host_of(rank)) for rank, pid in pids.items()]
    told = [f"rank {rank} is process {pid} on {host.name}" for rank, pid, host in places if host is not None]
    raise UsageError(
        f"the ranks of run {run.run_id} are on other machines",
        why="stacks are taken where the ranks are: " + "; ".join(told[:_MOST_TOLD]),
        fix=f"there: kill -USR2 PID; what the rank then writes comes here, to {run.stacks_dir}/rank-N.txt",
    )


def py_spy() -> str | None:
    """Where py-spy is: beside this interpreter, or on the path."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _of_rank(run: RunDir, rank: int, pid: int | None) -> RankStacks:
    if pid is None or not _is_rank(run, pid):
        return RankStacks(rank=rank, pid=pid, why="its process is gone")
    text, why = _by_py_spy(pid)
    if text:
        return RankStacks(rank=rank, pid=pid, way="py-spy", text=text)
    own, own_why = _by_itself(run, rank, pid)
    told = "; ".join(words for words in (why, own_why) if words)
    return RankStacks(rank=rank, pid=pid, way="faulthandler" if own else "", text=own, why=told)


def _is_rank(run: RunDir, pid: int) -> bool:
    """Whether the process is still a child of the run's supervisor, and not another one with its number."""
    if run.spec().script is not None:
        return _began_before(pid, run)
    identity = run.supervisor_identity()
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return identity is not None and int(stat.rpartition(")")[2].split()[1]) == identity.pid


def _began_before(pid: int, run: RunDir) -> bool:
    """A rank of a script had begun when it told of itself, and one that was found running before its run was
    made: a later process of its number began after that."""
    identity, made = process_identity(pid), run.created()
    told = [at for path in run.rank_events().values() if (at := written_at(path)) is not None]
    if identity is None or made is None:
        return False
    return identity.began <= max([made, *told])


def _by_py_spy(pid: int) -> tuple[str, str]:
    program = py_spy()
    if program is None:
        return "", "py-spy is not installed"
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=PY_SPY_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"py-spy: {error}"
    if done.returncode == 0 and done.stdout.strip():
        return done.stdout, ""
    said = done.stderr.strip().splitlines()
    words = said[0] if said else f"exit code {done.returncode}"
    return "", f"py-spy may not look (it needs the right to trace): {words}"


_NO_EAR_IN_A_SCRIPT = "a script's ranks tell their stacks through py-spy alone: pip install py-spy"


def _by_itself(
    run: RunDir, rank: int, pid: int, clock: Callable[[], float] = time.monotonic
) -> tuple[str, str]:
    """What the rank writes when it is asked, and why it wrote nothing; one of them is empty."""
    if not _listens(pid):
        script = run.spec().script is not None
        return "", _NO_EAR_IN_A_SCRIPT if script else "the rank does not listen: another version started it"
    path = _own_path(run, rank)
    before, deaf = _size(path), _threads_with(pid, "SigBlk")
    try:
        os.kill(pid, _SIGNAL)
    except ProcessLookupError:
        return "", "its process is gone"
    end = clock() + OWN_SECONDS
    while clock() < end and (_size(path) == before or _is_writing(pid, deaf)):
        time.sleep(_LOOK_SECONDS)
    if _size(path) == before:
        return "", f"the rank did not answer within {OWN_SECONDS:.0f} s: the kernel may hold it"
    with path.open("rb") as file:
        file.seek(before)
        return file.read().decode("utf-8", "replace"), ""


def _listens(pid: int) -> bool:
    """Whether the process catches the signal, which would end it otherwise."""
    return _has_signal(Path(f"/proc/{pid}/status"), "SigCgt")


def _is_writing(pid: int, deaf: frozenset[str]) -> bool:
    """Whether the signal has not come yet, or a thread is still in its handler, where it is blocked: a rank
    may be held up between the stacks of two threads. `deaf` threads have it blocked at any time."""
    waits = _has_signal(Path(f"/proc/{pid}/status"), "ShdPnd")
    return waits or bool(_threads_with(pid, "SigBlk") - deaf)


def _threads_with(pid: int, mask: str) -> frozenset[str]:
    """Threads of a process that have the signal in a mask of theirs."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        names = os.listdir(tasks)  # noqa: PTH208 - names alone
    except OSError:
        return frozenset()
    return frozenset(name for name in names if _has_signal(tasks / name / "status", mask))


def _has_signal(status: Path, mask: str) -> bool:
    """Whether the signal is in a mask of a process or thread, as `/proc` tells; not of one that is gone."""
    try:
        lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    told = next((line.split()[1] for line in lines if line.startswith(f"{mask}:")), "0")
    return bool(int(told, 16) >> (_SIGNAL - 1) & 1)


def _own_path(run: RunDir, rank: int) -> Path:
    return run.stacks_dir / f"rank-{rank}.txt"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _section(each: RankStacks) -> str:
    head = f"=== rank {each.rank}, process {each.pid}"
    head += f", by {each.way}" if each.way else ": n/a"
    note = f"({each.why})\n" if each.why else ""
    return f"{head}\n{note}{each.text}"

"""Names how a run ended: the rank at fault, its signal or exit code, and what a person could do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.errors import ExitCode
from llmtop.profiler.oom.message import short_message
from llmtop.profiler.record.checkpointevents import CheckpointSaved
from llmtop.profiler.record.events import RankFailed, RankFinished, RunEnded, XidSeen
from llmtop.profiler.record.logend import end_lines
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.units import format_bytes
from llmtop.trainer.change.restagefolder import restage_folders
from llmtop.trainer.statefile import newest_in
from llmtop.trainer.supervisor.loaderdeath import DIED, dead_workers, shared_memory_words
from llmtop.trainer.supervisor.loaderdeath import FIX as LOADER_FIX
from llmtop.trainer.supervisor.oom import Evidence
from llmtop.trainer.supervisor.ranks import RankExit

_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo|nccl|processgroup|collective|peer|timed? ?out"
    r"|remote process|watchdog",
    re.IGNORECASE,
)
"""What a rank says when another one has died on it."""

_TORCHRUN_SUMMARY = "ChildFailedError"
_PYTHON_ERROR = re.compile(
    r"(?:\[rank\d+\]:\s*)?(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b|.*: can't open file "
)
"""A traceback's last line; `[rank0]: ` is what torch puts before the lines of one."""

_SIGNAL_FIXES: dict[str, str] = {
    "SIGKILL": "find out who killed it: a person, a batch system, or the kernel for memory (dmesg says so)",
    "SIGSEGV": "it crashed in native code: update the GPU driver, torch and the kernels to matching releases",
    "SIGBUS": "shared memory or a mapped file was full or cut: look at df -h /dev/shm and at the data's disk",
    "SIGABRT": "native code gave up: the last lines of its log say why (often NCCL)",
    "SIGILL": "this processor lacks an instruction of the build: reinstall torch and delete the built ops",
    "SIGFPE": "native code divided by zero: try --attention eager and no kernels to find which",
    "SIGTERM": "somebody ended it: a person, a batch system or a shutdown{go_on}",
    "SIGHUP": "its session was closed{go_on}",
    "SIGXCPU": "it used up its CPU time limit: raise ulimit -t",
    "SIGXFSZ": "a file outgrew its limit: raise ulimit -f",
}

_MESSAGE_FIXES: tuple[tuple[str, str], ...] = (
    (DIED, LOADER_FIX),
    (r"no space left on device", "free space on the disk that holds the run, or in /dev/shm"),
    (r"too many open files", "raise the limit: ulimit -n 65536"),
    (
        r"loss scale.*minimum|minimum loss scale",
        "--precision bf16, or a lower --learning-rate: every fp16 step overflows",
    ),
    (r"cuda_home|nvcc|installed cuda version", "llmtop doctor; --optimizer adamw_torch needs no compiled op"),
    (
        r"error building extension|ninja",
        "llmtop doctor names what is missing; --optimizer adamw_torch needs no compiler",
    ),
    (r"no kernel image|not compatible with the current pytorch", "install the torch build for this GPU"),
    (r"driver version is insufficient|found no nvidia driver", "update the NVIDIA driver"),
    (
        r"no module named 'mpi4py'",
        "DeepSpeed was told no rank: start it through a launcher, torchrun --nproc-per-node N SCRIPT",
    ),
    (r"can't open file .*no such file", "start it in the script's folder, or give the script's whole path"),
    (r"address already in use", "start the run again: it takes another port"),
    (r"libaio|async_io", "install libaio's headers (libaio-dev) for NVMe offload, or offload to cpu instead"),
    (
        r"not enough buffers \d+ for swapping|already assigned swap buffer|no swap buffers to allocate",
        "DeepSpeed gathers more weights at once than it has buffers for those on NVMe: under --set"
        " deepspeed.zero_optimization. give max_live_parameters=1000000, max_reuse_distance=1000000 and"
        " prefetch_bucket_size=0, or a larger offload_param.max_in_cpu",
    ),
    (r"not.*supported on your device", "choose a --precision that this device has"),
    (r"nccl", "set NCCL_DEBUG=INFO and start again: the rank's log then names the link that fails"),
)


_MORE_HOST_MEMORY = "free host memory, start fewer ranks on this machine, or raise the container's limit"
_RANKS_TOLD = 4
SMALLER = "smaller --micro-batch or --seq-len, or --gradient-checkpointing"


class Story(Struct, frozen=True, kw_only=True):
    """All that is known when no rank is left."""

    world_size: int
    exits: tuple[RankExit, ...]
    """In the order seen."""
    finished: dict[int, RankFinished] = {}
    failed: dict[int, RankFailed] = {}
    killed: frozenset[int] = frozenset()
    """Ranks that the supervisor ended because it would wait no longer."""
    waited_for: str = ""
    """What those ranks did not do in time, in words."""
    stop_asked: bool = False
    save_asked: bool = False
    checkpoint: CheckpointSaved | None = None
    last_step: int = 0
    stepped: bool = False
    """Whether this attempt finished a step, so that there was something to save."""
    oom_evidence: Evidence | None = None
    """What says that a SIGKILL was the kernel's; None where nothing does."""
    host_fix: Callable[[RankFailed | None], str] = lambda failure: ""
    """The same of the host's memory, as far as a change of the run spares it."""
    memory_bytes: dict[int, int] = {}
    """Rank to what its processes held of host memory in the newest sample that saw them."""
    xids: tuple[XidSeen, ...] = ()
    """What the driver reported of the run's GPUs while it ran."""
    lost_devices: tuple[int, ...] = ()
    """GPUs that did not answer any more in the newest sample."""
    device_fix: Callable[[RankFailed | None], str] = lambda failure: SMALLER
    """What to do where device memory ran out, by the failure of the rank at fault as far as it told."""
    logs: dict[int, Path] = {}
    go_on: str = ""
    """How this run is continued."""


def how_to_go_on(run: RunDir) -> str:
    """What continues a run in place, from its newest state."""
    saved = newest_in((run.checkpoints_dir, *restage_folders(run)))
    if saved is None:
        return "it has no checkpoint to go on from"
    return f"llmtop resume {run.run_id} goes on after step {saved[0].step:,}"


def name_end(story: Story) -> RunEnded:
    """The last event of a run; of one that ended badly and can be continued, the fix says how."""
    end = _named(story)
    return end if end.state in ("completed", "stopped") else replace(end, fix=and_go_on(end.fix, story.go_on))


def and_go_on(fix: str, go_on: str) -> str:
    """The fix and what continues the run, where there is a checkpoint and the fix does not say so itself."""
    if "llmtop resume" not in go_on or "llmtop resume" in fix:
        return fix
    return "; ".join(filter(None, [fix, go_on]))


def _named(story: Story) -> RunEnded:
    at_fault = _first_fault(story)
    if at_fault is not None:
        failure = replace(_failure(story, at_fault), rank=at_fault.rank)
        return _with_gpu_errors(story, _with_memory_of_loaders(story, failure))
    clean = [exit_ for exit_ in story.exits if _clean(story, exit_)]
    if len(clean) == story.world_size:
        return _good_end(story)
    return _with_gpu_errors(story, _impatient_end(story))


def _with_memory_of_loaders(story: Story, end: RunEnded) -> RunEnded:
    """Where a worker of a DataLoader died, what is known of the memory that most often is why."""
    if end.state != "failed" or not any(dead_workers(end.reason)):
        return end
    killed = story.oom_evidence.words if story.oom_evidence is not None else ""
    told = "; ".join(filter(None, [killed, shared_memory_words()]))
    return replace(end, reason=f"{end.reason}{'; ' if told else ''}{told}{_held_at_death(story)}")


def _with_gpu_errors(story: Story, end: RunEnded) -> RunEnded:
    """What the driver said of the GPUs explains a failure better than what a rank made of it."""
    if end.state != "failed":
        return end
    # Most often 45, the cleaning up, follows what was the cause.
    worst = min(story.xids, key=lambda seen: (not seen.is_hardware, seen.xid == 45), default=None)
    if worst is not None:
        reason = f"{end.reason}; the driver reported Xid {worst.xid} of GPU {worst.device}: {worst.meaning}"
        fix = worst.fix if worst.is_hardware or not end.fix else f"{end.fix}; Xid {worst.xid}: {worst.fix}"
        return replace(end, reason=reason, fix=fix)
    if story.lost_devices:
        names = ", ".join(map(str, story.lost_devices))
        return replace(
            end,
            reason=f"{end.reason}; the driver has lost GPU {names}",
            fix="see dmesg for NVRM: Xid; restart the machine, and have the GPU's seat and power looked at",
        )
    return end


def _clean(story: Story, exit_: RankExit) -> bool:
    """A rank is done when it said so and left with 0; an exit code of 0 alone proves nothing."""
    return exit_.exit_code == 0 and exit_.rank in story.finished


def _first_fault(story: Story) -> RankExit | None:
    """The rank that failed by itself, not because another one was gone or the supervisor ended it."""
    faults = [e for e in story.exits if not _clean(story, e) and not _ended_by_us(story, e)]
    if any(_did_not_listen(story, e) for e in story.exits) and all(_lost_a_peer(story, e) for e in faults):
        # The others lost a rank that obeyed.
        return None
    return min(faults, key=lambda e: (_lost_a_peer(story, e), _failed_at(story, e)), default=None)


def _did_not_listen(story: Story, exit_: RankExit) -> bool:
    """The request to stop killed a rank that was still starting and had no ear for it."""
    return story.stop_asked and exit_.signal in ("SIGTERM", "SIGUSR1") and exit_.rank not in story.failed


def _ended_by_us(story: Story, exit_: RankExit) -> bool:
    killed = exit_.rank in story.killed and exit_.signal in ("SIGTERM", "SIGKILL")
    return _did_not_listen(story, exit_) or killed and exit_.rank not in story.failed


def _lost_a_peer(story: Story, exit_: RankExit) -> bool:
    failure = story.failed.get(exit_.rank)
    if failure is None:
        # Torn down together with the others: not where it began.
        return exit_.rank in story.killed
    return not failure.out_of_memory and bool(_LOST_PEER.search(failure.message))


def follows_from_another(story: Story, rank: int | None) -> bool:
    """Whether a rank's failure may be the consequence of another one's: it says so, or says nothing."""
    failure = None if rank is None else story.failed.get(rank)
    return failure is None or not failure.out_of_memory and bool(_LOST_PEER.search(failure.message))


def _failed_at(story: Story, exit_: RankExit) -> float:
    failure = story.failed.get(exit_.rank)
    return exit_.seen_at if failure is None or not failure.t else min(failure.t, exit_.seen_at)


def _good_end(story: Story) -> RunEnded:
    ranks = "the rank" if story.world_size == 1 else f"all {story.world_size} ranks"
    steps = [finished.last_step for finished in story.finished.values()]
    if all(finished.reason == "completed" for finished in story.finished.values()):
        return RunEnded(state="completed", reason=f"{ranks} finished step {max(steps)}")
    checkpoint = story.checkpoint
    is_new = story.save_asked and checkpoint is not None and checkpoint.step >= min(steps)
    saved = f", saved in {checkpoint.path}" if is_new and checkpoint is not None else ""
    return RunEnded(state="stopped", reason=f"stopped on request after step {max(steps)}{saved}")


def _impatient_end(story: Story) -> RunEnded:
    """Nobody failed by itself, but not every rank left by itself either."""
    step = f"after step {story.last_step}" if story.last_step else "before the first step"
    were = "was" if len(story.killed) == 1 else "were"
    killed = f"{_names(story.killed)} {story.waited_for} and {were} killed" if story.killed else ""
    if story.stop_asked and not (story.save_asked and story.stepped):
        return RunEnded(
            state="stopped", reason="; ".join(filter(None, [f"stopped on request {step}", killed]))
        )
    first = min(story.killed, default=None)
    return RunEnded(
        state="failed",
        reason=f"{killed} {step}",
        fix=_log_fix(story, 0 if first is None else first),
        rank=first,
    )


def _failure(story: Story, exit_: RankExit) -> RunEnded:
    failure = story.failed.get(exit_.rank)
    how = _how(story, exit_)
    if failure is None:
        return _unexplained_death(story, exit_, how)
    where = f" in {failure.stage}" if failure.stage else ""
    where += f" of step {failure.step}" if failure.step else ""
    reason = f"rank {exit_.rank}{where}: {_first_lines(failure)}"
    if not _told_by_us(failure):
        # The exit code of an error that llmtop itself tells says no more than its words.
        reason += f" ({how})"
    if failure.out_of_memory:
        return RunEnded(
            state="out_of_memory", reason=reason, fix=_memory_fix(story, failure, failure.message)
        )
    return RunEnded(state="failed", reason=reason, fix=_message_fix(story, exit_.rank, failure.message))


def _unexplained_death(story: Story, exit_: RankExit, how: str) -> RunEnded:
    """The rank left no last event: a signal, an exit from native code, or a silent exit."""
    reason = f"rank {exit_.rank} {how}"
    if exit_.signal == "SIGKILL":
        return _killed(story, exit_, reason)
    last = last_line(story.logs.get(exit_.rank))
    said = f"; its log ends: {last}" if last else ""
    if exit_.signal:
        go_on = f"; {story.go_on}" if story.go_on else ""
        fix = _SIGNAL_FIXES.get(exit_.signal, "").replace("{go_on}", go_on) or _log_fix(story, exit_.rank)
    elif exit_.exit_code == ExitCode.OUT_OF_MEMORY:
        return RunEnded(state="out_of_memory", reason=reason + said, fix=_memory_fix(story, None, last))
    else:
        fix = _message_fix(story, exit_.rank, last)
    return RunEnded(state="failed", reason=reason + said, fix=fix)


def _killed(story: Story, exit_: RankExit, reason: str) -> RunEnded:
    """By -9: for memory as far as that is proved or likely, else by whoever."""
    held, evidence = _held_at_death(story), story.oom_evidence
    if evidence is None or evidence.kind == "possible":
        words = f"; {evidence.words}" if evidence is not None else ""
        return RunEnded(state="failed", reason=f"{reason}{words}{held}", fix=_SIGNAL_FIXES["SIGKILL"])
    if evidence.kind == "proof":
        reason += f" by the kernel's OOM killer: {evidence.words}"
    else:
        reason += (
            f", most likely because host memory ran out: {evidence.words}, though nothing names who did it"
        )
    return RunEnded(state="out_of_memory", reason=reason + held, fix=_host_memory_fix(story, None))


def _held_at_death(story: Story) -> str:
    """What the ranks held of host memory when they were last looked at."""
    if not story.memory_bytes:
        return ""
    ranks = sorted(story.memory_bytes.items(), key=lambda pair: (-pair[1], pair[0]))
    told = ", ".join(f"rank {rank} {format_bytes(size)}" for rank, size in ranks[:_RANKS_TOLD])
    if len(ranks) > _RANKS_TOLD:
        told += f", all {len(ranks)} {format_bytes(sum(story.memory_bytes.values()))}"
    return f"; held last: {told} of host memory"


def _how(story: Story, exit_: RankExit) -> str:
    step = f" after step {story.last_step}" if story.last_step else " before its first step"
    if exit_.signal:
        return f"was killed by {exit_.signal}{step}"
    if exit_.exit_code == 0:
        return f"left with exit code 0{step} without having finished"
    return f"ended with exit code {exit_.exit_code}{step}"


def _first_lines(failure: RankFailed) -> str:
    """The error without torch's long explanations, and without the mend, which is told apart."""
    message = short_message(failure.message) if failure.shortage is not None else failure.message
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    said = [line.removeprefix("why: ") for line in lines if not line.startswith("fix: ")]
    text = ("; " if _told_by_us(failure) else " ").join(said[:3])
    ours = _told_by_us(failure) or failure.error_type == text.split(":")[0]
    name = "" if ours else f"{failure.error_type}: "
    return name + (text if len(text) <= 400 else text[:397] + "...")


def _told_by_us(failure: RankFailed) -> bool:
    """Whether it is an error of llmtop itself: what, why and fix, a line each."""
    return failure.error_type in ("LlmtopError", "UsageError")


def _memory_fix(story: Story, failure: RankFailed | None, message: str) -> str:
    on_host = failure is not None and failure.shortage is not None and failure.shortage.on_host
    if on_host or re.search(
        r"cannot allocate memory|defaultcpuallocator|memoryerror", message, re.IGNORECASE
    ):
        return _host_memory_fix(story, failure)
    return story.device_fix(failure)


def _host_memory_fix(story: Story, failure: RankFailed | None) -> str:
    by_a_change = story.host_fix(failure)
    return "; or ".join(filter(None, [by_a_change, _MORE_HOST_MEMORY]))


def _message_fix(story: Story, rank: int, message: str) -> str:
    # Errors of llmtop itself carry their mend in their last line.
    own = re.search(r"^\s*fix: (.+)$", message, re.MULTILINE)
    if own:
        return own.group(1)
    for pattern, fix in _MESSAGE_FIXES:
        if re.search(pattern, message, re.IGNORECASE):
            return fix
    return _log_fix(story, rank)


def _log_fix(story: Story, rank: int) -> str:
    log = story.logs.get(rank)
    return f"read the end of {log}" if log else ""


def last_line(log: Path | None) -> str:
    """The last line that is not empty; nothing for a log that cannot be read."""
    return _telling_line(end_lines(log))[-300:]


def _telling_line(lines: Sequence[str]) -> str:
    """The last line, or what a rank said last before torchrun summed up that it failed."""
    summed_up = next((at for at, line in enumerate(lines) if _TORCHRUN_SUMMARY in line), None)
    if summed_up is not None:
        errors = [line for line in lines[:summed_up] if _PYTHON_ERROR.match(line)]
        if errors:
            return errors[-1]
    return lines[-1] if lines else ""


def _names(ranks: frozenset[int]) -> str:
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
    return f"ranks {shown}"

"""How the end of a run is named, from what is known when no rank is left."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmtop.profiler.hardware.xid import xid_seen
from llmtop.profiler.record.checkpointevents import CheckpointSaved
from llmtop.profiler.record.events import RankFailed, RankFinished, RunEnded
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.supervisor.loaderdeath import dead_workers, shared_memory_words
from llmtop.trainer.supervisor.oom import Evidence
from llmtop.trainer.supervisor.postmortem import Story, how_to_go_on, name_end
from llmtop.trainer.supervisor.ranks import RankExit


def exited(rank: int, code: int | None = None, signal: str | None = None, at: float = 10.0) -> RankExit:
    return RankExit(rank=rank, pid=100 + rank, exit_code=code, signal=signal, seen_at=at)


def failed(message: str, at: float = 9.0, **more: Any) -> RankFailed:
    return RankFailed(message=message, t=at, **{"error_type": "RuntimeError", **more})


def story(*exits: RankExit, **more: Any) -> Story:
    return Story(world_size=len(exits), exits=exits, last_step=7, stepped=True, **more)


DONE = RankFinished(reason="completed", last_step=9)
STOPPED = RankFinished(reason="stopped", last_step=9)


def test_completed_needs_the_word_of_every_rank_and_its_exit_code() -> None:
    both = {0: DONE, 1: DONE}
    assert name_end(story(exited(0, 0), exited(1, 0), finished=both)).state == "completed"
    assert name_end(story(exited(0, 0), exited(1, 0), finished={0: DONE})).state == "failed"
    assert name_end(story(exited(0, 0), exited(1, 1), finished=both)).state == "failed"
    assert name_end(story(exited(0, 0), finished={0: DONE})).reason == "the rank finished step 9"


def test_stopped_says_where_it_was_saved() -> None:
    saved = CheckpointSaved(step=9, path="/c/9", size_bytes=1, seconds=1.0)
    asked = {"finished": {0: STOPPED}, "stop_asked": True, "save_asked": True}
    assert name_end(story(exited(0, 0), checkpoint=saved, **asked)).reason.endswith("step 9, saved in /c/9")
    older = CheckpointSaved(step=5, path="/c/5", size_bytes=1, seconds=1.0)
    assert name_end(story(exited(0, 0), checkpoint=older, **asked)).reason.endswith("after step 9")


def test_first_failure_is_named_even_when_it_is_seen_last() -> None:
    end = name_end(
        story(
            exited(0, 1, at=10.0),
            exited(1, 1, at=10.1),
            failed={0: failed("bad batch", at=9.9), 1: failed("index out of range", at=9.0)},
        )
    )
    assert end.reason.startswith("rank 1: RuntimeError: index out of range") and end.rank == 1


@pytest.mark.parametrize(
    "lost",
    ["[gloo] Connection closed by peer", "NCCL error: remote process exited", "Broken pipe", "Timed out"],
)
def test_a_rank_that_lost_another_is_not_at_fault(lost: str) -> None:
    end = name_end(
        story(exited(0, 1, at=10.0), exited(1, None, "SIGSEGV", at=10.2), failed={0: failed(lost, at=9.9)})
    )
    assert end.reason.startswith("rank 1 was killed by SIGSEGV after step 7")
    alone = name_end(
        story(exited(0, 1), exited(1, None, "SIGKILL"), failed={0: failed(lost)}, killed=frozenset({1}))
    )
    assert alone.reason.startswith("rank 0: RuntimeError: ")
    assert (end.rank, alone.rank) == (1, 0)


def test_nobody_is_at_fault_in_a_good_end_and_who_hung_first_in_a_hung_one() -> None:
    assert name_end(story(exited(0, 0), finished={0: DONE})).rank is None
    hung = name_end(
        story(
            exited(0, 0),
            exited(1, None, "SIGKILL"),
            finished={0: DONE},
            killed=frozenset({1}),
            waited_for="did not end with the others",
        )
    )
    assert (hung.state, hung.rank) == ("failed", 1)


def test_ranks_that_the_supervisor_killed_are_not_at_fault() -> None:
    end = name_end(story(exited(0, 3), exited(1, None, "SIGKILL", at=9.0), killed=frozenset({1})))
    assert end.reason.startswith("rank 0 ended with exit code 3")


def test_the_kernels_killer_is_named_only_with_proof() -> None:
    victim = exited(0, None, "SIGKILL")

    def told(kind: Any, **more: Any) -> RunEnded:
        return name_end(story(victim, oom_evidence=Evidence(kind=kind, words="so it is"), **more))

    proved = told("proof", memory_bytes={0: 3 << 30, 1: 5 << 30})
    assert proved.state == "out_of_memory" and "host memory" in proved.fix
    assert proved.reason == (
        "rank 0 was killed by SIGKILL after step 7 by the kernel's OOM killer: so it is; held last:"
        " rank 1 5.00 GiB, rank 0 3.00 GiB of host memory"
    )
    likely = told("likely")
    assert likely.state == "out_of_memory"
    assert "most likely because host memory ran out: so it is, though nothing names" in likely.reason
    possible = told("possible", memory_bytes=dict.fromkeys(range(6), 1 << 30))
    assert possible.state == "failed" and "OOM killer" not in possible.reason
    assert "so it is; held last" in possible.reason and "all 6 6.00 GiB" in possible.reason
    without = name_end(story(victim))
    assert without.state == "failed"
    assert "dmesg" in without.fix and "dmesg" in possible.fix


def test_device_memory_gets_the_predictions_advice() -> None:
    failure = failed("CUDA out of memory", out_of_memory=True, stage="backward", step=1)
    end = name_end(story(exited(0, 5), failed={0: failure}, device_fix=lambda told: f"for {told.stage}"))
    assert end.state == "out_of_memory"
    assert "in backward of step 1" in end.reason
    assert end.fix == "for backward"
    host = failed("DefaultCPUAllocator: can't allocate memory", out_of_memory=True)
    assert "host memory" in name_end(story(exited(0, 5), failed={0: host})).fix
    trained_there = name_end(story(exited(0, 5), failed={0: host}, host_fix=lambda told: "less"))
    assert trained_there.fix.startswith("less; or free host memory, start fewer ranks")
    silent = name_end(story(exited(0, 5)))
    assert silent.state == "out_of_memory"


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ("OSError: [Errno 28] No space left on device", "free space"),
        ("AssertionError: Not enough buffers 0 for swapping 1", "max_live_parameters=1000000"),
        ("AssertionError: param 267 already assigned swap buffer id 1", "max_live_parameters=1000000"),
        ("Current loss scale already at minimum - cannot decrease scale anymore", "bf16"),
        ("CUDA_HOME does not exist, unable to compile", "adamw_torch"),
        ("what\n  why: because\n  fix: do this", "do this"),
        ("nothing known", "rank-0.log"),
    ],
)
def test_known_messages_have_their_mend(message: str, word: str) -> None:
    end = name_end(story(exited(0, 1), failed={0: failed(message)}, logs={0: Path("rank-0.log")}))
    assert end.state == "failed"
    assert word in end.fix
    assert "fix:" not in end.reason


@pytest.mark.parametrize(
    "message",
    [
        "DataLoader worker (pid(s) 4711, 4712) exited unexpectedly",
        "DataLoader worker (pid 4711) is killed by signal: Killed.",
        "DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's"
        " workers are out of shared memory. Please try to raise your shared memory limit.",
    ],
)
def test_a_dead_worker_of_a_data_loader_is_told_with_the_memory_that_is_known(message: str) -> None:
    assert next(dead_workers(message)) == 4711
    full = Evidence(kind="likely", words="98 % of host memory was in use")
    end = name_end(
        story(
            exited(0, 1),
            failed={0: failed(message)},
            logs={0: Path("rank-0.log")},
            oom_evidence=full,
            memory_bytes={0: 3 << 30},
        )
    )
    assert end.state == "failed" and "num_workers" in end.fix and "/dev/shm" in end.fix
    # What looks like an option of llmtop would be told as one.
    assert "--" not in end.fix
    assert full.words in end.reason and "rank 0 3.00 GiB of host memory" in end.reason
    silent = name_end(story(exited(0, 1), failed={0: failed("IndexError: 7")}, oom_evidence=full))
    assert full.words not in silent.reason


def test_shared_memory_that_is_not_there_is_not_told(tmp_path: Path) -> None:
    assert shared_memory_words(tmp_path / "none") == ""
    assert re.fullmatch(r"\S+ holds .+, of which .+ are free now", shared_memory_words(tmp_path))


def test_an_error_of_our_own_is_told_in_its_own_words() -> None:
    message = "the data: 8 tokens are too few\n  why: the rank needs 128\n  fix: give more text"
    failure = failed(message, error_type="UsageError", stage="data")
    end = name_end(story(exited(0, 2), failed={0: failure}))
    assert end.reason == "rank 0 in data: the data: 8 tokens are too few; the rank needs 128"
    assert end.fix == "give more text"


def test_long_messages_are_cut() -> None:
    end = name_end(story(exited(0, 1), failed={0: failed("x" * 5000)}))
    assert len(end.reason) < 600


def test_the_log_is_quoted_where_nothing_else_is_known(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"one\n" * 9000 + b"terminate called: \xff what\n\n")
    end = name_end(story(exited(0, None, "SIGABRT"), logs={0: log}))
    assert end.reason.endswith("its log ends: terminate called: \ufffd what")
    assert name_end(story(exited(0, 9), logs={0: tmp_path / "none.log"})).state == "failed"


def test_what_a_rank_said_counts_and_not_how_torchrun_sums_it_up(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(
        "[rank0]: Traceback (most recent call last):\n[rank0]:   File ...\n"
        "[rank0]: ValueError: no column 'text'\n"
        "Traceback (most recent call last):\n    raise ChildFailedError(\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "============================================================\n"
    )
    end = name_end(story(exited(0, 1), logs={0: log}))
    assert end.reason.endswith("its log ends: [rank0]: ValueError: no column 'text'")


def test_stopping_before_the_ranks_listen_is_no_failure() -> None:
    end = name_end(
        Story(
            world_size=2,
            exits=(exited(0, None, "SIGUSR1"), exited(1, 1)),
            failed={1: failed("Connection reset by peer")},
            stop_asked=True,
        )
    )
    assert (end.state, end.reason) == ("stopped", "stopped on request before the first step")


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGHUP"])
def test_a_run_that_somebody_ended_says_what_continues_it(signal_name: str, tmp_path: Path) -> None:
    checkpoints = tmp_path / "a run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    run = RunDir(tmp_path / "a run")
    first = how_to_go_on(run)
    end = name_end(story(exited(0, None, signal_name), go_on=first))
    assert end.fix.endswith("; it has no checkpoint to go on from")
    state = checkpoints / "step-5"
    state.mkdir()
    (state / "index.json").write_text("{}")
    assert how_to_go_on(run) == first
    marker = {"step": 5, "position": {}, "world_size": 2, "files": {"index.json": 2}}
    (state / "llmtop.json").write_text(json.dumps(marker))
    later = how_to_go_on(run)
    end = name_end(story(exited(0, None, signal_name), go_on=later))
    assert end.fix.endswith("; llmtop resume a run goes on after step 5")
    (state / "index.json").write_text("")
    assert how_to_go_on(run) == first
    assert "{" not in name_end(story(exited(0, None, signal_name))).fix


def test_every_bad_end_of_a_run_with_a_checkpoint_says_what_continues_it() -> None:
    go_on = "llmtop resume a-run goes on after step 5"
    killed, crashed = exited(0, None, "SIGKILL"), exited(0, 1)
    proof = Evidence(kind="proof", words="so it is")
    gone = exited(0, 1)
    for told in (
        story(killed, go_on=go_on),
        story(killed, go_on=go_on, oom_evidence=proof),
        story(exited(0, None, "SIGSEGV"), go_on=go_on),
        story(crashed, go_on=go_on, failed={0: failed("bad batch")}),
        story(gone, go_on=go_on, xids=(xid_seen(1, 79),)),
        story(gone, go_on=go_on, lost_devices=(1,)),
        story(killed, go_on=go_on, killed=frozenset({0}), waited_for="made no step"),
    ):
        end = name_end(told)
        assert end.fix.endswith(f"; {go_on}") or end.fix == go_on, end
    nothing = "it has no checkpoint to go on from"
    assert "checkpoint" not in name_end(story(killed, go_on=nothing)).fix
    own = name_end(story(crashed, go_on=go_on, failed={0: failed("no\nfix: llmtop resume a-run --fix 1")}))
    assert own.fix.count("llmtop resume") == 1
    assert name_end(story(exited(0, 0), finished={0: DONE}, go_on=go_on)).fix == ""


def test_an_error_of_the_gpu_explains_a_failure() -> None:
    victim = exited(0, 1)
    failure = {0: failed("CUDA error: unspecified launch failure")}
    end = name_end(story(victim, failed=failure, xids=(xid_seen(0, 45), xid_seen(1, 79))))
    assert end.reason.endswith("the driver reported Xid 79 of GPU 1: the GPU has fallen off the bus")
    assert end.fix.startswith("take the GPU out of use")
    own = name_end(story(victim, failed=failure, xids=(xid_seen(0, 45), xid_seen(0, 31))))
    assert "Xid 31 of GPU 0" in own.reason and "CUDA_LAUNCH_BLOCKING" in own.fix
    stuck = {"killed": frozenset({0}), "stop_asked": True, "save_asked": True, "waited_for": "did not stop"}
    hung = name_end(story(exited(0, None, "SIGKILL"), xids=(xid_seen(0, 119),), **stuck))
    assert hung.state == "failed" and "Xid 119 of GPU 0" in hung.reason
    gone = name_end(story(victim, failed=failure, lost_devices=(3,)))
    assert gone.reason.endswith("the driver has lost GPU 3") and "dmesg" in gone.fix


def test_an_error_of_the_gpu_changes_no_other_end() -> None:
    noise = {"xids": (xid_seen(0, 63),), "lost_devices": (1,)}
    assert "Xid" not in name_end(story(exited(0, 0), finished={0: DONE}, **noise)).reason
    told = failed("CUDA out of memory", out_of_memory=True)
    end = name_end(story(exited(0, 5), failed={0: told}, **noise))
    assert end.state == "out_of_memory" and "Xid" not in end.reason


@pytest.mark.parametrize(
    ("said", "quoted", "fix"),
    [
        ("python: can't open file '/x/train.py': [Errno 2] No such file or directory", "train.py", "folder"),
        ("ModuleNotFoundError: No module named 'mpi4py'", "mpi4py", "torchrun --nproc-per-node"),
    ],
)
def test_a_script_that_cannot_begin_says_how_it_could(
    tmp_path: Path, said: str, quoted: str, fix: str
) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(f"{said}\nraise ChildFailedError(\n====\n")
    end = name_end(story(exited(0, 1), logs={0: log}))
    assert quoted in end.reason and fix in end.fix

"""Slurm itself: its daemons on this machine, allocations of two nodes, steps that srun starts."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from llmtop.profiler.record.events import RunEnded, StepFinished
from llmtop.profiler.record.hostabout import read_about
from llmtop.profiler.record.hostevents import HostJoined, HostLeft
from llmtop.profiler.record.hosts import HostDir, read_hosts
from llmtop.profiler.record.rundir import list_runs
from tests.hosts.lab import wait_for
from tests.hosts.over_hosts import GRACES, OnHosts
from tests.hosts.slurm_cluster import CannotStart, Cluster, why_not
from tests.trainer.supervised import worker_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "a cluster can be made"),
]
LLMTOP = (sys.executable, "-m", "llmtop.tui.cli")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        made = Cluster(tmp_path_factory.mktemp("slurm")).start()
    except CannotStart as error:
        pytest.skip(f"Slurm does not start here: {error}")
    with closing(made):
        yield made
        # A job that has just ended is still on its way out.
        wait_for(made.has_no_job, made.told)


class InSlurm(OnHosts):
    """The run of a folder that a job has made."""

    def __init__(self, root: Path) -> None:
        self.run = list_runs(root)[0]
        self.supervisor_pid = 0


def in_job(
    cluster: Cluster, root: Path, job: tuple[str, ...], *words: str, variables: dict[str, str] | None = None
) -> InSlurm:
    """`llmtop run` in an allocation, until its end."""
    given = {"LLMTOP_RUNS_DIR": str(root), **(variables or {})}
    named = [word for name in variables or {} for word in ("--env", name)]
    command = (*LLMTOP, "run", "cpu-demo", "--gpu", "cpu", "--force", "--headless", *named, *words)
    done = cluster.call("salloc", "--quiet", "--nodes=2", *job, *command, variables=given)
    assert list_runs(root), done.stderr
    return InSlurm(root)


def fakes(scenario: str) -> dict[str, str]:
    return {"LLMTOP_WORKER_COMMAND": worker_command(scenario), "LLMTOP_GRACES": GRACES}


@pytest.mark.parametrize(
    "job",
    [("--gres=gpu:2",), ("--ntasks=4", "--gpus-per-task=1"), ("--ntasks=4", "--gpus=4")],
)
def test_the_ranks_have_all_that_the_job_was_given_however_it_asked(
    cluster: Cluster, tmp_path: Path, job: tuple[str, ...]
) -> None:
    run = in_job(cluster, tmp_path, ("--mem=1G", *job), "--nodes", "2", variables=fakes("shows_environment"))
    assert run.end().state == "completed"
    joined = run.of(HostJoined)
    assert [(one.first_rank, one.ranks) for one in joined] == [(0, 2), (2, 2)]
    assert tuple(one.host for one in joined) == cluster.nodes
    told = [json.loads((run.run.path / f"environment-{rank}").read_text()) for rank in range(4)]
    places = [(one["RANK"], one["LOCAL_RANK"], one["SLURMD_NODENAME"]) for one in told]
    assert [place[:2] for place in places] == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    assert [place[2] for place in places] == [name for name in cluster.nodes for _ in range(2)]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in told} == {"0,1"}
    hosts = read_hosts(run.run)
    assert hosts is not None
    memory = {read_about(HostDir(run.run.path, host)).memory_bytes for host in hosts.hosts}  # type: ignore[union-attr]
    assert not cluster.has_cgroups or memory == {1 << 30}


def test_nodes_of_which_the_job_has_not_as_many_gpus_are_steps_of_their_own(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = ("--ntasks=3", "--gpus=3", "--mem=1G")
    run = in_job(cluster, tmp_path, job, "--nodes", "2", variables=fakes("shows_environment"))
    assert run.end().state == "completed"
    assert [(one.first_rank, one.ranks) for one in run.of(HostJoined)] == [(0, 2), (2, 1)]
    told = [json.loads((run.run.path / f"environment-{rank}").read_text()) for rank in range(3)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in told] == ["0,1", "0,1", "0"]
    assert {one["WORLD_SIZE"] for one in told} == {"3"}
    assert [one["LOCAL_WORLD_SIZE"] for one in told] == ["2", "2", "1"]


def test_a_command_of_ones_own_has_as_many_ranks_on_each_node_as_the_job_has_gpus_there(
    cluster: Cluster, tmp_path: Path
) -> None:
    """torchrun once a node, by srun; whose ranks are whose follows from how Slurm has dealt them out."""
    script = tmp_path / "tells.py"
    script.write_text(
        "import json, os, pathlib\n"
        "path = pathlib.Path(__file__).with_name('told-' + os.environ['RANK'])\n"
        "path.write_text(json.dumps(dict(os.environ)))\n"
    )
    command = (str(Path(sys.executable).with_name("torchrun")), "--max-restarts=0", str(script))
    words = (*LLMTOP, "run", "--nodes", "2", "--headless", "--", *command)
    job = ("salloc", "--quiet", "--nodes=2", "--ntasks=3", "--gpus=3", "--mem=2G")
    done = cluster.call(*job, *words, variables={"LLMTOP_RUNS_DIR": str(tmp_path / "runs")})
    assert done.returncode == 0, done.stderr
    run = InSlurm(tmp_path / "runs")
    assert run.end().state == "completed"
    told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(3)]
    first, second = cluster.nodes
    assert [one["SLURMD_NODENAME"] for one in told] == [first, first, second]
    places = [(one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"], one["WORLD_SIZE"]) for one in told]
    assert places == [("0", "2", "3"), ("1", "2", "3"), ("0", "1", "3")]
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in told}) == 1
    assert [one["CUDA_VISIBLE_DEVICES"] for one in told] == ["0,1", "0,1", "0"]
    assert {one.host for one in run.of(HostLeft) if one.answered} == {first, second}


def test_slots_are_numbers_of_the_gpus_that_the_job_has(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.nodes
    words = ("--include", f"{first}:1@{second}:1")
    run = in_job(
        cluster, tmp_path, ("--gres=gpu:2", "--mem=1G"), *words, variables=fakes("shows_environment")
    )
    assert run.end().state == "completed"
    told = [json.loads((run.run.path / f"environment-{rank}").read_text()) for rank in range(2)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in told] == ["1", "1"]


def test_what_srun_says_of_nodes_that_cannot_start_is_told(cluster: Cluster, tmp_path: Path) -> None:
    words = ("--nodes", "2", "--gpus", "1", "--remote-python", "/nowhere/python")
    end = in_job(cluster, tmp_path, ("--mem=1G",), *words).end()
    assert end.state == "failed"
    assert ": srun says: exited with exit code 2; it says: slurmstepd-" in end.reason
    assert "/nowhere/python: No such file or directory" in end.reason


def test_a_model_is_trained_by_a_batch_job_and_the_job_ends_with_it(cluster: Cluster, tmp_path: Path) -> None:
    """The real worker: gloo between the steps' tasks, ZeRO-2."""
    words = ("run", "cpu-demo", "--gpu", "cpu", "--gpus", "1", "--nodes", "2", "--steps", "2", "--headless")
    command = shlex.join((*LLMTOP, *words))
    log = tmp_path / "job.log"
    job = ("sbatch", "--parsable", "--nodes=2", "--mem=2G", "--overcommit", f"--output={log}", "--wrap")
    runs = tmp_path / "runs"
    number = cluster.call(*job, command, variables={"LLMTOP_RUNS_DIR": str(runs)}).stdout.strip()
    wait_for(cluster.has_no_job, cluster.told)
    assert "JobState=COMPLETED" in cluster.call("scontrol", "show", "job", number).stdout, log.read_text()
    run = InSlurm(runs)
    assert run.end().state == "completed"
    for rank in range(2):
        assert [event.step for event in run.events(rank) if isinstance(event, StepFinished)] == [1, 2]
    assert {one.host for one in run.of(HostLeft) if one.answered} == set(cluster.nodes)


def test_a_run_whose_job_is_told_to_end_stops_and_the_job_ends(cluster: Cluster, tmp_path: Path) -> None:
    """As Slurm tells it, some time ahead where `--signal=B:TERM@120` asks for that."""
    given = fakes("trains")
    named = [word for name in given for word in ("--env", name)]
    words = ("run", "cpu-demo", "--gpu", "cpu", "--gpus", "1", "--nodes", "2", "--headless", "--force")
    command = "exec " + shlex.join((*LLMTOP, *words, *named))
    job = ("sbatch", "--parsable", "--nodes=2", "--mem=1G", f"--output={tmp_path / 'job.log'}", "--wrap")
    variables = {"LLMTOP_RUNS_DIR": str(tmp_path / "runs"), **given}
    number = cluster.call(*job, command, variables=variables).stdout.strip()
    wait_for(lambda: list_runs(tmp_path / "runs"), cluster.told)
    run = InSlurm(tmp_path / "runs")
    wait_for(run.run.supervisor_alive, cluster.told)
    run.wait_for_step(2)
    cluster.call("scancel", "--signal=TERM", "--full", number)
    wait_for(cluster.has_no_job, cluster.told)
    wait_for(lambda: bool(run.of(RunEnded)), run.log)
    assert run.of(RunEnded)[-1].state == "stopped"
    run.nothing_is_left()

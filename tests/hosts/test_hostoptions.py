"""What the words of `llmtop run` say of hosts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.trainer.hosts import hostfile
from llmtop.tui.cli import main
from llmtop.tui.commandline.hostoptions import Chosen, chosen_hosts
from llmtop.tui.commands import run


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return parser.parse_args(words)


def chosen(*words: str, environment: dict[str, str] | None = None) -> Chosen:
    found = chosen_hosts(parsed(*words), environment or {})
    assert found is not None
    return found


@pytest.fixture
def pool(tmp_path: Path) -> str:
    path = tmp_path / "hostfile"
    path.write_text("a slots=4\nb slots=4\nc slots=4\n")
    return str(path)


def test_a_run_without_hosts_is_one_of_this_machine() -> None:
    assert chosen_hosts(parsed(), {}) is None
    assert chosen_hosts(parsed("--nodes", "1", "--gpus", "2"), {}) is None
    # An allocation alone starts nothing on other nodes.
    assert chosen_hosts(parsed(), {"SLURM_JOB_NODELIST": "n[1-4]"}) is None


def test_a_hostfile_says_nodes_and_gpus(pool: str) -> None:
    args = parsed("--hostfile", pool)
    found = chosen_hosts(args, {})
    assert found is not None and (args.nodes, args.gpus) == (3, 4)
    assert found.hosts.launcher == "ssh" and not found.hosts.choose_devices
    some = chosen("--hostfile", pool, "--include", "c:1,3@a:0,2")
    assert [(host.name, host.slots) for host in some.hosts.hosts] == [("a", (0, 2)), ("c", (1, 3))]
    assert some.hosts.choose_devices
    first = chosen("--hostfile", pool, "--nodes", "2", "--gpus", "1")
    assert [(host.name, host.slots) for host in first.hosts.hosts] == [("a", (0,)), ("b", (0,))]


def test_hosts_need_not_have_as_many_slots(pool: str) -> None:
    args = parsed("--hostfile", pool, "--include", "a:0,1,2@c:1")
    found = chosen_hosts(args, {})
    assert found is not None and (args.nodes, args.gpus, args.total_gpus) == (2, 3, 4)
    assert [list(host.ranks) for host in found.hosts.hosts] == [[0, 1, 2], [3]]
    assert not hasattr(parsed("--hostfile", pool), "total_gpus")


def test_a_total_is_that_of_the_hosts_whoever_says_it(
    pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank is told how many there are: more would be waited for, for ever."""
    assert chosen("--hostfile", pool, "--total-gpus", "12").hosts.world_size == 12
    uneven = ("--hostfile", pool, "--include", "a:0,1,2@c:1")
    assert chosen(*uneven, "--total-gpus", "4").hosts.world_size == 4
    for words in (("--hostfile", pool), uneven):
        with pytest.raises(UsageError, match="total_gpus = 11, and the hosts have"):
            chosen(*words, "--total-gpus", "11")
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setattr("llmtop.trainer.hosts.starters.require_launcher", lambda launcher: launcher)
    recipe = tmp_path / "own.toml"
    recipe.write_text('base = "cpu-demo"\ntotal_gpus = 11\n')
    code = main(["run", str(recipe), "--hostfile", pool, "--gpu", "cpu", "--force", "--detach"])
    assert code == ExitCode.USAGE and not (tmp_path / "runs").exists()
    assert "total_gpus = 11, and the hosts have 12 slots together" in capsys.readouterr().err


def test_nodes_are_those_of_the_allocation() -> None:
    slurm = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_GPUS_ON_NODE": "8"}
    found = chosen("--nodes", "2", environment=slurm)
    assert [host.name for host in found.hosts.hosts] == ["n1", "n2"]
    assert found.hosts.launcher == "srun" and found.hosts.world_size == 16
    assert chosen("--launcher", "ssh", "--nodes", "4", environment=slurm).hosts.launcher == "ssh"


def test_filters_choose_among_the_nodes_of_the_allocation() -> None:
    slurm = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_GPUS_ON_NODE": "8"}
    assert [host.name for host in chosen("--exclude", "n2", environment=slurm).hosts.hosts] == [
        "n1",
        "n3",
        "n4",
    ]
    assert len(chosen("--launcher", "srun", environment=slurm).hosts.hosts) == 4


def test_nodes_without_hosts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfile, "DEFAULT_HOSTFILE", tmp_path / "hostfile")
    with pytest.raises(UsageError, match="--nodes 2 needs to be told which hosts"):
        chosen("--nodes", "2")
    (tmp_path / "hostfile").write_text("a slots=1\nb slots=1\n")
    assert len(chosen("--nodes", "2").hosts.hosts) == 2


def test_variables_are_named_one_by_one(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    found = chosen("--hostfile", pool, "--env", "NCCL_DEBUG", "--env", "TOKEN=a=b", "--env", "TOKEN=c")
    assert found.hosts.variables == ("NCCL_DEBUG", "TOKEN") and found.variables == {"TOKEN": "c"}
    for words, problem in (("NOT_SET_ANYWHERE", "is not set here"), ("A B=1", "no name of a variable")):
        with pytest.raises(UsageError, match=problem):
            chosen("--hostfile", pool, "--env", words)


@pytest.mark.parametrize(
    "words", [("--env", "A=1"), ("--launcher", "srun"), ("--include", "a"), ("--master-addr", "10.0.0.1")]
)
def test_words_about_hosts_that_nobody_named_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="is for a run over hosts"):
        chosen_hosts(parsed(*words), {})


@pytest.mark.parametrize("words", [("--nodes", "many"), ("--nodes", "0"), ("--gpus", "1..4")])
def test_counts_that_are_none_are_refused(pool: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="no number of"):
        chosen("--hostfile", pool, *words)


def test_filters_do_not_go_with_counts_as_with_deepspeed(pool: str) -> None:
    with pytest.raises(UsageError, match="do not go with"):
        chosen("--hostfile", pool, "--exclude", "a", "--nodes", "1")

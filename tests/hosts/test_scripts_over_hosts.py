"""Commands of one's own over hosts: network namespaces with an sshd each, and not as many slots on each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtop.presets.errors import UsageError
from llmtop.presets.resolve import Machine
from llmtop.presets.spec import ValueSource
from llmtop.profiler.record.events import RankExited, RankStarted, StepFinished
from llmtop.profiler.record.hostevents import HostLeft
from llmtop.profiler.record.hosts import Hosts
from llmtop.trainer.hosts.hostfile import with_ranks
from llmtop.trainer.hosts.scriptcommand import check_over_hosts, kind_of, processes
from llmtop.trainer.script.unseen import unseen_spec
from tests.hosts.in_lab import IN_LAB, InLab, tidy_lab
from tests.hosts.lab import Lab, wait_for
from tests.script.watching import SCRIPTS

BIN = Path(sys.executable).parent
HOSTS = Hosts(hosts=with_ranks({"a": (0, 1), "user@b": (2,)}))
TELLS = """import json, os, sys, time
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
told = {name: os.environ.get(name) for name in names}
print("told " + json.dumps({**told, "words": sys.argv[1:]}), flush=True)
if "--fails" in sys.argv and told["RANK"] == "2":
    sys.exit("no such luck")
while "--waits" in sys.argv or "--fails" in sys.argv:
    time.sleep(0.1)
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with tidy_lab(tmp_path) as made:
        (made.root / "tells.py").write_text(TELLS)
        yield made


def over(lab: Lab, *command: str, check: bool = True, watch: str = "--headless") -> InLab:
    """Two ranks on the first host and one on the second."""
    words = ("run", "--hostfile", str(lab.hostfile((2, 1))), watch, "--env", "LLMTOP_GRACES", "--", *command)
    lab.llmtop(*words, check=check, variables={"LLMTOP_GRACES": "peers=0.3,script=20,host=60"})
    return InLab(lab)


def told(run: InLab) -> dict[int, dict[str, object]]:
    """What each rank has said, in the output of its host."""
    lines = [
        line.partition("told ")[2]
        for path in run.run.path.glob("rank-*.log")
        for line in path.read_text().splitlines()
        if "told " in line
    ]
    return {int(one["RANK"]): one for one in map(json.loads, lines)}


@IN_LAB
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        (str(BIN / "torchrun"), "--max-restarts=0"),
        (str(BIN / "deepspeed"), "--no_local_rank"),
        (sys.executable,),
    ],
    ids=["torchrun", "deepspeed", "python"],
)
def test_all_ranks_of_all_hosts_are_one_job(lab: Lab, command: tuple[str, ...]) -> None:
    run = over(lab, *command, str(lab.root / "tells.py"), "--epochs", "1")
    end = run.end()
    assert end.state == "completed", (end, run.log())
    ranks = told(run)
    assert {rank: one["LOCAL_RANK"] for rank, one in ranks.items()} == {0: "0", 1: "1", 2: "0"}
    assert {one["WORLD_SIZE"] for one in ranks.values()} == {"3"}
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in ranks.values()}) == 1
    assert all(one["words"] == ["--epochs", "1"] for one in ranks.values())
    assert all(one.answered for one in run.of(HostLeft))


@IN_LAB
@pytest.mark.slow
def test_the_ranks_that_torchrun_starts_on_hosts_are_watched(lab: Lab) -> None:
    """Through a gloo group over the namespaces; what they tell comes to the launching machine."""
    run = over(lab, str(BIN / "torchrun"), str(SCRIPTS / "together.py"))
    end = run.end()
    assert end.state == "completed", (end, run.log())
    for rank in range(3):
        steps = [event.step for event in run.events(rank) if isinstance(event, StepFinished)]
        assert steps and steps[-1] == 4
    assert {one.rank for one in run.of(RankStarted)} == {0, 1, 2}
    assert run.run.spec().world_size == 3


@IN_LAB
@pytest.mark.slow
def test_a_rank_that_fails_on_one_host_ends_the_others_and_its_words_are_told(lab: Lab) -> None:
    run = over(lab, sys.executable, str(lab.root / "tells.py"), "--fails", check=False)
    end = run.end()
    assert end.state == "failed" and end.rank == 2 and "no such luck" in end.reason
    exits = {one.rank: one.exit_code for one in run.of(RankExited)}
    assert set(exits) == {0, 1, 2} and exits[2] == 1


@IN_LAB
@pytest.mark.slow
def test_a_command_is_stopped_on_all_hosts(lab: Lab) -> None:
    run = over(lab, sys.executable, str(lab.root / "tells.py"), "--waits", watch="--detach")
    wait_for(lambda: len(told(run)) == 3, run.log)
    assert lab.llmtop("stop", run.run.run_id).returncode == 0
    assert run.end().state == "stopped"


@IN_LAB
@pytest.mark.slow
def test_a_host_that_lacks_the_command_is_named(lab: Lab) -> None:
    folder = lab.root / "here-alone"
    folder.mkdir()
    program = folder / "train"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    lab.hide("h2", folder)
    end = over(lab, str(program), check=False).end()
    assert end.state == "failed" and end.reason == f"host h2: there is no program {program}"


def test_what_kind_a_command_is() -> None:
    kinds = {
        "torchrun train.py": "torchrun",
        "python3.11 -m torch.distributed.run train.py": "torchrun",
        "/venv/bin/deepspeed train.py": "deepspeed",
        "python train.py": "python",
        "python -m package.train": "python",
        "bash train.sh": "other",
    }
    assert {command: kind_of(command.split()) for command in kinds} == kinds


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("torchrun --nnodes=2 train.py", "torchrun --nnodes and hosts exclude each other"),
        ("torchrun --nproc_per_node 2 train.py", "--nproc-per-node 2: host user@b has 1 slot"),
        ("python -m torch.distributed.run --standalone train.py", "--standalone and hosts"),
        ("deepspeed --num_gpus 2 train.py", "deepspeed --num-gpus and hosts"),
        ("deepspeed -H hosts train.py", "deepspeed -H and hosts"),
        ("torchrun --rdzv_backend=c10d train.py", "--rdzv-backend c10d and hosts exclude each other"),
        ("accelerate launch train.py", "accelerate is not started on hosts"),
    ],
)
def test_launchers_that_are_told_of_other_hosts_are_refused(command: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        check_over_hosts(command.split(), HOSTS)


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --max-restarts 0 train.py --nnodes 2",
        "torchrun --run-path train.py --nnodes 2",
        "deepspeed --module pkg.train --include x",
        "bash x",
    ],
)
def test_words_of_the_script_are_its_own(command: str) -> None:
    check_over_hosts(command.split(), HOSTS)


def test_torchruns_options_without_a_value_are_known() -> None:
    """Else the script would be taken for one, and its words for the launcher's."""
    from torch.distributed.run import get_args_parser

    for action in get_args_parser()._actions:
        # One of these is refused, the other one ends it.
        if action.nargs == 0 and not {"--standalone", "--help"} & set(action.option_strings):
            check_over_hosts(["torchrun", action.option_strings[0], "train.py", "--nnodes", "2"], HOSTS)


@pytest.mark.parametrize("option", ["--virtual-local-rank", "--a-later-switch"])
def test_an_option_after_a_switch_is_seen(option: str) -> None:
    with pytest.raises(UsageError, match="--nnodes and hosts"):
        check_over_hosts(["torchrun", option, "--nnodes=2", "train.py"], HOSTS)


def test_deepspeed_is_told_the_slots_and_no_names(tmp_path: Path) -> None:
    (one,) = processes(
        ["deepspeed", "--module", "pkg.train", "--x"],
        HOSTS,
        HOSTS.hosts[1],
        address="10.0.0.1",
        port=1234,
        folder=tmp_path,
    )
    assert one.number == 2
    assert one.command == (
        *("deepspeed", "--no_ssh", "--node_rank=1", "--master_addr=10.0.0.1", "--master_port=1234"),
        *(f"--hostfile={tmp_path / 'hostfile'}", "--include=node-0:0,1@node-1:2", "--module", "pkg.train"),
        "--x",
    )
    assert (tmp_path / "hostfile").read_text() == "node-0 slots=2\nnode-1 slots=3\n"


def test_what_the_hosts_have_is_said_by_whoever_said_it() -> None:
    here = Machine(gpu="cpu", gpus=1, host_memory_bytes=None)
    own, given = (unseen_spec(("x",), Path("/"), here, hosts=HOSTS, gpu=gpu) for gpu in ("auto", "h200"))
    assert (own.gpu.kind, own.provenance["gpu"].source) == ("cpu", ValueSource.MACHINE)
    assert (given.gpu.name, given.provenance["gpu"].detail) == ("h200", "--gpu h200")
    assert (given.options.nodes, given.options.gpus, given.world_size) == (2, 2, 3)


def test_a_script_of_the_shell_learns_where_all_ranks_are() -> None:
    (one,) = processes(
        ["bash", "train.sh"],
        HOSTS,
        HOSTS.hosts[0],
        address="fd00::1",
        port=9,
        folder=Path(),
    )
    assert one.variables["PET_MASTER_ADDR"] == "fd00::1" and one.variables["PET_NNODES"] == "2"
    assert one.variables["NODE_RANK"] == "0" and one.variables["NPROC_PER_NODE"] == "2"

"""Hostfiles, their filters, and what Slurm says of an allocation."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtop.presets.errors import UsageError
from llmtop.profiler.record.hosts import Hosts, Launcher
from llmtop.trainer.hosts import slurm
from llmtop.trainer.hosts.devices import chosen_devices
from llmtop.trainer.hosts.hostfile import choose, parse_hostfile, read_hostfile, take, with_ranks

HOSTFILE = """
# three machines
worker-0 slots=4
worker-1   slots=4   max_slots=8
worker-2\tslots=2
"""

FILTERS = [
    ("", ""),
    ("worker-1", ""),
    ("worker-1:0,2@worker-0", ""),
    ("worker-2@worker-0:3", ""),
    ("worker-0:1@worker-0:0,1", ""),
    ("", "worker-1"),
    ("", "worker-1:0,3@worker-2:1"),
    ("", "worker-0:0,1,2,3"),
    ("", "worker-0:0@worker-0:1"),
]
_REAL = """
import json, sys
from deepspeed.launcher.runner import _parse_hostfile, parse_inclusion_exclusion
text, filters = json.loads(sys.argv[1])
pool = _parse_hostfile(text.splitlines())
print(json.dumps([list(parse_inclusion_exclusion(pool, *one).items()) for one in filters]))
"""


@pytest.mark.slow
def test_hostfiles_and_filters_mean_what_they_mean_to_deepspeed() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _REAL, json.dumps([HOSTFILE, FILTERS])], capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    real = json.loads(told.stdout.splitlines()[-1])
    pool = parse_hostfile(HOSTFILE)
    ours = [
        [[host, list(slots)] for host, slots in choose(pool, include=include, exclude=exclude).items()]
        for include, exclude in FILTERS
    ]
    assert ours == real


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no host"),
        ("# nothing\n\n", "names no host"),
        ("worker-0\n", "line 1"),
        ("worker-0 slots=x\n", "line 1"),
        ("worker-0 slots=1\nworker-0 slots=1\n", "line 2: worker-0 is there twice"),
        ("-oProxyCommand=x slots=1\n", "is not the name of a host"),
        ("../up slots=1\n", "is not the name of a host"),
        ("$(reboot) slots=1\n", "is not the name of a host"),
        ("nöde slots=1\n", "is not the name of a host"),
        # No folder can be called so.
        ("a" * 256 + " slots=1\n", "is at most 255 long"),
    ],
)
def test_a_hostfile_that_cannot_be_used_names_its_line(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as told:
        parse_hostfile(text)
    assert problem in str(told.value) and len(str(told.value)) < 500


def test_files_of_other_systems_are_read(tmp_path: Path) -> None:
    """What an editor of Windows writes ahead of the text, and at the end of each line."""
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfh1 slots=2\r\n# none\r\nh2 slots=1\r\n")
    assert read_hostfile(tmp_path / "hosts") == {"h1": (0, 1), "h2": (0,)}


def test_a_message_names_some_of_ten_thousand_hosts() -> None:
    pool = parse_hostfile("".join(f"w{number} slots=8\n" for number in range(10_000)))
    asks: tuple[Callable[[], object], ...] = (
        lambda: take(pool, nodes=20_000),
        lambda: choose(pool, include="#"),
    )
    for asked in asks:
        with pytest.raises(UsageError, match=r"w7 and 9,992 more") as told:
            asked()
        assert len(str(told.value)) < 300


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "x", tmp_path / "missing"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_hostfile(path)


@pytest.mark.parametrize(
    ("include", "exclude", "problem"),
    [
        ("worker-0", "worker-1", "cannot both"),
        ("worker-7", "", "not in the hostfile"),
        ("worker-0:9", "", "has no slot 9"),
        ("worker-0:x", "", "HOST:SLOT"),
        ("", "worker-0@worker-1@worker-2", "leaves no host"),
    ],
)
def test_filters_that_cannot_be_used(include: str, exclude: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        choose(parse_hostfile(HOSTFILE), include=include, exclude=exclude)


def test_ranks_follow_the_order_of_the_hostfile() -> None:
    pool = parse_hostfile(HOSTFILE)
    hosts = with_ranks(take(pool, nodes=2))
    assert [(host.name, host.first_rank, list(host.ranks)) for host in hosts] == [
        ("worker-0", 0, [0, 1, 2, 3]),
        ("worker-1", 4, [4, 5, 6, 7]),
    ]
    assert [(host.first_rank, len(host.slots)) for host in with_ranks(pool)] == [(0, 4), (4, 4), (8, 2)]
    with pytest.raises(UsageError, match="worker-3 has no slot"):
        with_ranks({**pool, "worker-3": ()})
    assert [len(host.slots) for host in with_ranks(take(pool, gpus=2))] == [2, 2, 2]
    with pytest.raises(UsageError, match="worker-2 has 2 slots"):
        take(pool, gpus=3)
    with pytest.raises(UsageError, match="there are 3 hosts"):
        take(pool, nodes=4)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu[01-03,7],login1", ["gpu01", "gpu02", "gpu03", "gpu7", "login1"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a,b-c[9-11]-ib", ["a", "b-c9-ib", "b-c10-ib", "b-c11-ib"]),
    ],
)
def test_lists_of_nodes_as_slurm_writes_them(names: str, expected: list[str]) -> None:
    assert list(slurm.expand(names)) == expected


@pytest.mark.parametrize("names", ["gpu[1-", "gpu[x]", "a,,b", "gpu[1-2-3]"])
def test_a_list_that_slurm_does_not_write(names: str) -> None:
    with pytest.raises(UsageError, match="as Slurm writes them"):
        list(slurm.expand(names))


def test_an_allocation_says_how_many_gpus_a_node_has() -> None:
    nodes = {"SLURM_JOB_NODELIST": "n[1-2]"}
    assert slurm.allocation(nodes | {"SLURM_GPUS_ON_NODE": "4"}, slots=None) == {
        "n1": (0, 1, 2, 3),
        "n2": (0, 1, 2, 3),
    }
    assert len(slurm.allocation(nodes | {"SLURM_GPUS_PER_NODE": "h200:8"}, slots=None)["n2"]) == 8
    assert len(slurm.allocation(nodes | {"SLURM_NTASKS_PER_NODE": "2(x2)"}, slots=None)["n1"]) == 2
    tasks = {"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}
    assert slurm.allocation(nodes | tasks, slots=None) == {"n1": (0, 1), "n2": (0,)}
    assert len(slurm.allocation(nodes, slots=3)["n1"]) == 3
    with pytest.raises(UsageError, match="does not say how many GPUs"):
        slurm.allocation(nodes, slots=None)


def test_the_gpus_of_a_job_are_read_from_what_scontrol_says_of_it() -> None:
    """Of Slurm 22.05: `--gpus=3 --ntasks=3` on two nodes, a type, other resources, none."""
    job = (
        "JobId=4 TRES=cpu=3,node=2,billing=3 JOB_GRES=gpu:3   Nodes=n1 CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0-1)"
        "   Nodes=n[2,4] CPU_IDs=0 Mem=1024 GRES=shard:4,gpu:h200:1(IDX:0)   Nodes=n3 CPU_IDs=0 Mem=0 GRES= "
    )
    assert slurm.parse_job_gpus(job) == {"n1": 2, "n2": 1, "n4": 1, "n3": 0}
    assert slurm.parse_job_gpus("slurm_load_jobs error: Invalid job id specified") == {}


@pytest.mark.parametrize(
    ("launcher", "visible", "expected"),
    [("srun", "2,3", "3"), ("srun", "", "1"), ("ssh", "2,3", "1"), ("srun", "GPU-a,GPU-b", "GPU-b")],
)
def test_slots_count_the_gpus_of_the_job_in_slurm_and_of_the_machine_elsewhere(
    launcher: Launcher, visible: str, expected: str
) -> None:
    hosts = Hosts(hosts=with_ranks({"n1": (1,)}), launcher=launcher, choose_devices=True)
    found = chosen_devices(hosts.hosts[0], hosts, {"CUDA_VISIBLE_DEVICES": visible})
    assert found == {"CUDA_VISIBLE_DEVICES": expected}

"""What srun and pdsh say of hosts: lines that the real programs have written."""

from __future__ import annotations

from pathlib import Path

from llmtop.trainer.hosts.starterwords import Call, StarterWords


def said(tmp_path: Path, program: str, hosts: tuple[str, ...], lines: str, calls: int = 1) -> StarterWords:
    log = tmp_path / "log"
    log.write_text("of an earlier start\n" + lines)
    each = [hosts] if calls == 1 else [(host,) for host in hosts]
    made = [Call(command=(f"/usr/bin/{program}", "-x"), hosts=group) for group in each]
    return StarterWords(made, log, len("of an earlier start\n"))


def test_pdsh_names_hosts_without_their_users(tmp_path: Path) -> None:
    lines = (
        "h1: bash: line 1: /nowhere/python: No such file or directory\n"
        "pdsh@vm: h1: ssh exited with exit code 127\npdsh@vm: h2: ssh killed by signal 9\nnot yet a li"
    )
    words = said(tmp_path, "pdsh", ("root@h1", "h2", "h3"), lines)
    assert words.how_ended("root@h1") == "exited with exit code 127"
    assert words.of("root@h1") == "bash: line 1: /nowhere/python: No such file or directory"
    assert (words.how_ended("h2"), words.of("h2")) == ("killed by signal 9", "")
    assert words.how_ended("h3") == "" and "not yet" not in words.newest()
    with (tmp_path / "log").open("a") as log:
        log.write("ne\npdsh@vm: h3: ssh exited with exit code 255\n")
    assert words.how_ended("h3") == "exited with exit code 255"


def test_srun_numbers_what_tasks_say_and_names_nodes_in_its_own_words(tmp_path: Path) -> None:
    lines = (
        "1: slurmstepd: error: execve(): /nowhere/python: No such file or directory\n"
        "srun: error: n[1-2]: tasks 0-1: Exited with exit code 2\n"
        "srun: error: task 2 launch failed: Slurmd could not execve job\n"
        "srun: error: n[1-: task 0: looks like one\n"
    )
    words = said(tmp_path, "srun", ("n1", "n2", "n3", "n4"), lines)
    assert [words.how_ended(name) for name in ("n1", "n2")] == ["exited with exit code 2"] * 2
    assert words.of("n1") == "" and "execve(): /nowhere/python" in words.of("n2")
    assert words.how_ended("n3") == "launch failed: Slurmd could not execve job"
    assert words.how_ended("n4") == ""


def test_of_several_steps_no_number_names_a_node(tmp_path: Path) -> None:
    lines = "0: whose words are these\nsrun: error: n2: task 0: Out Of Memory\n"
    words = said(tmp_path, "srun", ("n1", "n2"), lines, calls=2)
    assert words.of("n1") == words.of("n2") == ""
    assert (words.how_ended("n1"), words.how_ended("n2")) == ("", "out of memory")

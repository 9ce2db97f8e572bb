"""As many hosts as a process has files for by default, and more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_LIMITED = """
import os, resource, sys, time
from llmtop.presets.errors import LlmtopError
from llmtop.trainer.hosts.openfiles import make_room
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    make_room(int(sys.argv[3]))
except LlmtopError as error:
    sys.exit(str(error))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
_LINK = """
from llmtop.trainer.hosts import ssh
from llmtop.trainer.hosts.link import Link
others = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
command = [sys.executable, "-c", ssh._BEGIN, str(len(ssh.far_program()))]
link = Link(command, {"do": "runs", "root": sys.argv[4]}, None)
link.start()
end = time.monotonic() + 120
while link.runs is None and not link.problem and time.monotonic() < end:
    time.sleep(0.02)
print(link.runs, link.problem)
link.close()
"""


def limited(
    soft: int, hard: int, hosts: int, *words: str, more: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _LIMITED + more, *map(str, (soft, hard, hosts)), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=150)


def test_more_files_are_asked_for_where_hosts_need_them() -> None:
    assert limited(300, 4000, 4).stdout == "300\n"
    assert limited(300, 4000, 500).stdout == "3256\n"


def test_a_machine_that_does_not_allow_them_is_named_with_what_to_raise() -> None:
    told = limited(300, 2000, 500).stderr
    assert (
        "500 hosts take 3,256 open files" in told
        and "allows a process 2,000" in told
        and "ulimit -Hn" in told
    )


def test_the_link_to_a_host_works_beyond_the_first_thousand_files(tmp_path: Path) -> None:
    """Those of the hosts before it."""
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / "spec.json").touch()
    assert limited(1024, 4000, 500, str(tmp_path), more=_LINK).stdout.splitlines() == ["3256", "['run-1'] "]

"""A link to a host without ssh between: files, lines, pings and starts go over pipes as they do over ssh."""

from __future__ import annotations

import ast
import errno
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from llmtop.presets.errors import UsageError
from llmtop.profiler.record.processidentity import process_identity
from llmtop.trainer.hosts import beat, remote, ssh
from llmtop.trainer.hosts.beat import SignWatch, give_sign
from llmtop.trainer.hosts.farfolder import Followed
from llmtop.trainer.hosts.link import Link
from llmtop.trainer.hosts.remote import Far
from llmtop.trainer.hosts.twin import Kept, Twin
from tests.hosts.lab import wait_for

KEPT = Kept(
    grow=("*.jsonl", "hosts/*/*.jsonl"),
    last=("supervisor*.jsonl",),
    whole=("*.json",),
    sent=("docs/*", "other"),
    appended=("orders",),
)


@pytest.fixture
def links() -> Iterator[list[Link]]:
    made: list[Link] = []
    yield made
    for link in made:
        link.close()


@pytest.fixture
def connect(tmp_path: Path, links: list[Link]) -> Callable[..., Link]:
    """A link from `tmp_path/near/run` to `tmp_path/far/run`."""
    (tmp_path / "near" / "run").mkdir(parents=True)
    (tmp_path / "far" / "run").mkdir(parents=True)
    # The last words are what a link's thread is called by.
    command = [sys.executable, "-c", ssh._BEGIN, str(len(ssh.far_program()))]

    def made(**opening: Any) -> Link:
        message = {"do": "open", "id": "run", "root": str(tmp_path / "far"), "make": True, **opening}
        link = Link(command, message, Twin(tmp_path / "near" / "run", KEPT))
        links.append(link)
        link.start()
        wait_for(lambda: link.opened, lambda: link.problem)
        return link

    return made


def test_lines_come_as_they_are_written_and_documents_as_they_are_replaced(
    tmp_path: Path, connect: Callable[..., Link]
) -> None:
    near, far = tmp_path / "near" / "run", tmp_path / "far" / "run"
    (far / "hosts" / "h1").mkdir(parents=True)
    (far / "hosts" / "h1" / "a.jsonl").write_text("one\n")
    connect()
    wait_for(lambda: _text(near / "hosts/h1/a.jsonl") == "one\n")
    with (far / "hosts" / "h1" / "a.jsonl").open("a") as file:
        file.write("two\nthr")
    (far / "state.json").write_text("{}")
    wait_for(lambda: _text(near / "hosts/h1/a.jsonl") == "one\ntwo\nthr")
    wait_for(lambda: _text(near / "state.json") == "{}")
    (far / "state.json").unlink()
    wait_for(lambda: not (near / "state.json").exists())


def test_what_tells_of_other_files_never_comes_before_them(tmp_path: Path) -> None:
    """A rank's last line and the word of its end are written while the folder is looked at."""
    (tmp_path / "rank-0.jsonl").write_text("step\n")
    (tmp_path / "supervisor.jsonl").write_text("started\n")
    told: list[tuple[str, bytes]] = []

    def say(message: dict[str, Any], body: bytes = b"") -> None:
        told.append((message["path"], body))
        if message["path"] == "rank-0.jsonl" and body == b"step\n":
            # Right after it was read.
            (tmp_path / "rank-0.jsonl").write_text("step\nfinished\n")
            (tmp_path / "supervisor.jsonl").write_text("started\nexited\n")

    followed = Followed(tmp_path, ["*.jsonl"], ["supervisor.jsonl"], [], {})
    for _ in range(2):
        followed.look(say, lambda: False)
    assert told == [
        ("rank-0.jsonl", b"step\n"),
        ("supervisor.jsonl", b"started\n"),
        ("rank-0.jsonl", b"finished\n"),
        ("supervisor.jsonl", b"exited\n"),
    ]


def test_documents_and_orders_reach_the_far_side(tmp_path: Path, connect: Callable[..., Link]) -> None:
    near, far = tmp_path / "near" / "run", tmp_path / "far" / "run"
    (near / "docs").mkdir()
    (near / "docs" / "spec").write_text("first")
    (near / "orders").write_text("1\n")
    connect()
    wait_for(lambda: _text(far / "orders") == "1\n")
    assert _text(far / "docs/spec") == "first", "what an order is about is there before it"
    with (near / "orders").open("a") as file:
        file.write("2\n")
    wait_for(lambda: _text(far / "orders") == "1\n2\n")
    (near / "docs" / "spec").unlink()
    wait_for(lambda: not (far / "docs" / "spec").exists())


def test_what_the_far_side_cannot_write_waits_and_is_written_in_its_order(
    tmp_path: Path, connect: Callable[..., Link]
) -> None:
    """Here something lies in the way of one file: others pass it, but no order. One that was lost would be
    so for good."""
    near, far = tmp_path / "near" / "run", tmp_path / "far" / "run"
    (near / "docs").mkdir()
    (far / "docs").write_text("no folder")
    (near / "docs" / "spec").write_text("first")
    (near / "orders").write_text("1\n")
    link = connect()
    wait_for(lambda: link.problem == "write: docs/spec: File exists")
    with (near / "orders").open("a") as file:
        file.write("2\n")
    (near / "other").write_text("passes")
    done = link.sync()
    wait_for(lambda: _text(far / "other") == "passes")
    wait_for(lambda: link.synced >= done)
    assert not (far / "orders").exists(), "an order never is there before the document it tells of"
    (far / "docs").unlink()
    wait_for(lambda: _text(far / "orders") == "1\n2\n")
    assert _text(far / "docs/spec") == "first"
    wait_for(lambda: link.problem == "")


def far_in(root: Path, sign: str = "") -> Far:
    """A far end whose folder is `root`, without its streams: what it says stays in `_write`."""
    far = Far.__new__(Far)
    far._root, far._sign, far._unable, far._write = root, sign, "", bytearray()
    far._unwritten, far._stuck, far._write_at = deque(), {}, 0.0
    far._followed, far._pid_path, far._sync, far._pong = None, "supervisor.pid", None, None
    return far


@pytest.mark.parametrize("lives", [True, False])
def test_that_a_supervisor_is_gone_is_told_after_its_last_words(tmp_path: Path, lives: bool) -> None:
    """Else a run that has ended would be taken for a lost one by whoever reads in between."""
    far = far_in(tmp_path)
    identity = process_identity(os.getpid())
    assert identity is not None
    identity = identity if lives else replace(identity, pid=2**22 + 1)
    (tmp_path / "supervisor.pid").write_bytes(msgspec.json.encode(identity))
    far._followed = Followed(tmp_path, ["*.jsonl"], [], [], {})
    (tmp_path / "supervisor.jsonl").write_text("run_ended\n")
    far._do({"do": "ping", "n": 1}, b"")
    assert (b"pong" in far._write) == lives
    far._look(far._followed)
    said = bytes(far._write)
    assert said.count(b"pong") == 1 and (said.index(b"pong") < said.index(b"run_ended")) == lives


def test_orders_do_not_wait_for_ever_for_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that cannot be told to stop is worse than an order that names what it lacks."""
    far = far_in(tmp_path)
    (tmp_path / "spec").mkdir()
    far._do({"do": "put", "path": "spec"}, b"never")
    far._do({"do": "append", "path": "orders", "at": 0}, b"1\n")
    far._do({"do": "append", "path": "orders", "at": 2}, b"2\n")
    far._keep()
    assert not (tmp_path / "orders").exists() and b"spec: Is a directory" in far._write
    monkeypatch.setattr(remote, "_ORDERS_WAIT_SECONDS", 0.0)
    far._keep()
    assert _text(tmp_path / "orders") == "1\n2\n"
    assert [message["path"] for message, _ in far._unwritten] == ["spec"]
    (tmp_path / "spec").rmdir()
    far._keep()
    assert _text(tmp_path / "spec") == "never" and not far._unwritten and far._unable == ""


def test_orders_wait_for_each_file_that_cannot_be_written_also_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("llmtop.trainer.hosts.remote.time.monotonic", lambda: now)
    far = far_in(tmp_path)
    (tmp_path / "spec").mkdir()
    far._do({"do": "put", "path": "spec"}, b"never")
    now += 2 * remote._ORDERS_WAIT_SECONDS
    (tmp_path / "later").mkdir()
    far._do({"do": "put", "path": "later"}, b"soon")
    far._do({"do": "append", "path": "orders", "at": 0}, b"1\n")
    far._keep()
    assert not (tmp_path / "orders").exists(), "what it tells of may still come"
    (tmp_path / "later").rmdir()
    far._keep()
    assert _text(tmp_path / "later") == "soon" and _text(tmp_path / "orders") == "1\n"
    assert list(far._stuck) == ["spec"]
    # The same file waits anew when it cannot be written a second time.
    (tmp_path / "spec").rmdir()
    far._keep()
    assert far._stuck == {} and not far._unwritten
    (tmp_path / "spec").unlink()
    (tmp_path / "spec").mkdir()
    far._do({"do": "put", "path": "spec"}, b"again")
    far._do({"do": "append", "path": "orders", "at": 2}, b"2\n")
    far._keep()
    assert _text(tmp_path / "orders") == "1\n"
    now += 2 * remote._ORDERS_WAIT_SECONDS
    far._keep()
    assert _text(tmp_path / "orders") == "1\n2\n"


def test_a_full_disk_silences_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "lead.json"
    give_sign(path, {"n": 1})
    watch, far = SignWatch(path), far_in(tmp_path, path.name)
    watch.quiet_seconds()
    monkeypatch.setattr(beat, "write_atomic", full)
    monkeypatch.setattr(remote, "_replace", full)
    signs: tuple[Callable[[], None], ...] = (
        lambda: give_sign(path, {"n": 2}),
        lambda: far._give_sign(b"{}"),
    )
    for sign in signs:
        before = watch._changed_at
        sign()
        watch.quiet_seconds()
        assert watch._changed_at > before
    assert path.read_bytes() == b'{"n":1}'
    assert b'"why": "No space left on device"' in far._write


def test_a_connection_that_breaks_is_mended_and_loses_no_line(
    tmp_path: Path, connect: Callable[..., Link]
) -> None:
    near, far = tmp_path / "near" / "run", tmp_path / "far" / "run"
    (near / "orders").write_text("1\n")
    link = connect()
    wait_for(lambda: _text(far / "orders") == "1\n")
    expected = ""
    for turn in range(4):
        for line in range(2000):
            expected += f"{turn} {line} {'x' * 100}\n"
        (far / "a.jsonl").write_text(expected)
        with (near / "orders").open("a") as file:
            file.write(f"{turn + 2}\n")
        wait_for(lambda: (near / "a.jsonl").exists() and (near / "a.jsonl").stat().st_size > 0)
        # In the middle of a file as often as not.
        far_pid = break_link()
        wait_for(lambda pid=far_pid: _child_of_link() not in (pid, 0))  # type: ignore[misc]
    wait_for(lambda: _text(near / "a.jsonl") == expected, lambda: link.problem)
    wait_for(lambda: _text(far / "orders") == "1\n2\n3\n4\n5\n")


def test_a_folder_that_both_sides_have_is_not_copied(tmp_path: Path, connect: Callable[..., Link]) -> None:
    near = tmp_path / "near" / "run"
    (near / "lead.json").write_text('{"mark": "a1b2c3"}')
    link = connect(path=str(near), mark="a1b2c3", mark_in="lead.json")
    assert link.shared and link.far_path == str(near)
    assert not connect(path=str(near), mark="another", mark_in="lead.json").shared


def test_what_is_started_has_its_variables_from_the_message_and_its_end_is_told(
    tmp_path: Path, connect: Callable[..., Link]
) -> None:
    link, far = connect(), tmp_path / "far" / "run"
    show = "import os,sys; print(os.environ['SECRET'], sys.argv[1]); sys.exit(7)"
    link.say(
        {
            "do": "spawn",
            "command": [sys.executable, "-c", show, "{run}"],
            "environment": {"SECRET": "$(reboot) 'x'"},
            "folder": "/nowhere",
            "log": "hosts/h1/supervisor.log",
        }
    )
    wait_for(lambda: link.ended_code == 7, lambda: link.problem)
    assert _text(far / "hosts/h1/supervisor.log") == f"$(reboot) 'x' {far}\n"


def test_clocks_are_told_with_how_sure_that_is(tmp_path: Path, links: list[Link]) -> None:
    command = [sys.executable, "-c", ssh._BEGIN, str(len(ssh.far_program()))]
    import time

    link = Link(
        command,
        {"do": "open", "id": "run", "root": str(tmp_path), "make": True},
        None,
        wall=lambda: time.time() - 1000.0,
    )
    links.append(link)
    link.start()
    wait_for(lambda: link.clock is not None, lambda: link.problem)
    assert link.clock is not None
    assert abs(link.clock.offset_seconds - 1000.0) <= link.clock.error_seconds + 1e-6


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "", ".", "a//b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    for said in ("grew", "whole", "gone", "cut"):
        with pytest.raises(ValueError, match="is no file of a run"):
            Twin(tmp_path / "run", KEPT).take({"say": said, "path": name, "at": 0}, b"x")
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("whole", "docs/spec"),
        ("whole", "a.jsonl"),
        ("whole", "hosts/h1/state.json"),
        ("whole", ".state.json"),
        ("grew", "orders"),
        ("grew", "state.json"),
        ("grew", "hosts/a.jsonl"),
        ("grew", "hosts/h1/deeper/a.jsonl"),
        ("gone", "orders"),
    ],
)
def test_a_file_that_was_not_asked_for_is_refused(tmp_path: Path, said: str, name: str) -> None:
    (tmp_path / "orders").write_text("1\n")
    with pytest.raises(ValueError, match="was asked for"):
        Twin(tmp_path, KEPT).take({"say": said, "path": name, "at": 0}, b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["orders"]
    assert _text(tmp_path / "orders") == "1\n"


@pytest.mark.parametrize(
    "words",
    [
        b"5\n",
        b"Welcome!\n",
        b"{}\n",
        b'{"say": "whole", "path": 7, "bytes": 1}\nx',
        b'{"say": "whole", "path": "a.json", "bytes": -1}\n',
        b'{"say": "synced"}\n',
    ],
)
def test_a_far_side_that_says_something_else_is_named_and_tried_again(
    tmp_path: Path, links: list[Link], words: bytes
) -> None:
    show = f"import sys; sys.stdout.buffer.write({words!r}); sys.stdout.flush(); sys.stdin.buffer.read()"
    link = Link([sys.executable, "-c", show, "", ""], {"do": "runs"}, Twin(tmp_path, KEPT))
    links.append(link)
    link.start()
    wait_for(lambda: bool(link.problem))
    first = link.problem
    link.problem = ""
    wait_for(lambda: link.problem == first)


def test_the_far_side_does_not_say_what_the_folder_here_follows(tmp_path: Path) -> None:
    (tmp_path / "remote.json").write_text("own")
    for said in ("whole", "gone"):
        Twin(tmp_path, KEPT).take({"say": said, "path": "remote.json", "mtime_ns": 0}, b"theirs")
    assert _text(tmp_path / "remote.json") == "own"


def test_bytes_that_do_not_go_on_are_refused(tmp_path: Path) -> None:
    twin = Twin(tmp_path, KEPT)
    twin.take({"say": "grew", "path": "a.jsonl", "at": 0}, b"one\n")
    with pytest.raises(ValueError, match="begins at 9"):
        twin.take({"say": "grew", "path": "a.jsonl", "at": 9}, b"two\n")
    assert _text(tmp_path / "a.jsonl") == "one\n"


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", "a b", "$(x)", "a;b", "a/b", ""])
def test_ssh_is_never_given_such_a_host(host: str) -> None:
    with pytest.raises(UsageError, match="is not the name of a host"):
        ssh.link_command(host, sys.executable)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
def test_a_path_with_blanks_and_quotes_reaches_the_far_shell_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ssh.VARIABLE, "-F none -p 2222")
    python = tmp_path / "it's $HOME; a python"
    python.symlink_to(sys.executable)
    command = ssh.link_command("worker-1", str(python))
    assert command[1:5] == ["-F", "none", "-p", "2222"]
    assert command[command.index("--") + 1] == "worker-1"
    # What sshd does with the last word.
    told = subprocess.run(["sh", "-c", command[-1]], input=b"", capture_output=True)
    assert told.returncode == 1, "it ends when nothing is sent"
    assert told.stderr == b""


def test_what_is_sent_to_hosts_needs_an_old_python_alone() -> None:
    tree = ast.parse(ssh.far_program(), feature_version=(3, 8))
    imported = {
        alias.name if isinstance(node, ast.Import) else str(node.module).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported <= set(sys.stdlib_module_names), imported


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def break_link() -> int:
    """Kill the far end, as soon as there is one; its pid."""
    wait_for(_child_of_link)
    pid = _child_of_link()
    assert pid > 0, "0 would be all processes of this group"
    os.kill(pid, 9)
    return pid


def _child_of_link() -> int:
    """The far end's process, which is a child of this one; 0 while there is none."""
    threads = list(Path(f"/proc/{os.getpid()}/task").iterdir())
    pids = [pid for thread in threads for pid in _children_of(thread)]
    mine = [pid for pid in pids if b"llmtop-link" in _command_line(pid)]
    return mine[0] if mine else 0


def _children_of(thread: Path) -> list[int]:
    """None of a thread that has ended by now."""
    try:
        return [int(pid) for pid in (thread / "children").read_text().split()]
    except OSError:
        return []


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_the_far_end_waits_while_there_is_nothing_to_look_at(tmp_path: Path) -> None:
    """It would turn in circles otherwise: on a shared folder, and while the other side takes nothing."""
    far = Far.__new__(Far)  # its streams stay this process's own
    far._followed, far._listing, far._look_at, far._write = None, None, 0.0, bytearray()
    assert far.pause_seconds(1000.0) > 0.1
    far._followed = Followed(tmp_path, ["*.jsonl"], [], [], {})
    assert far.pause_seconds(1000.0) == 0.0
    far._look_at = 1000.2
    assert far.pause_seconds(1000.0) == pytest.approx(0.2)
    far._look_at, far._write = 0.0, bytearray(8 << 20)
    assert far.pause_seconds(1000.0) > 0.1


def test_where_ssh_ends_while_it_is_written_to_its_own_words_say_why(
    tmp_path: Path, links: list[Link]
) -> None:
    """Not that a pipe is broken."""
    refuses = "import os, sys; os.close(0); os.write(2, b'Permission denied (publickey).')"
    link = Link([sys.executable, "-c", refuses, "", ""], {"do": "runs"}, None)
    links.append(link)
    link.start()
    for _ in range(3):
        wait_for(lambda: bool(link.problem))
        assert link.problem == "Permission denied (publickey)."
        link.problem = ""

"""Whatever stands in the place of a file: refused at once, in words, by every reader of documents."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from llmtop.presets import catalog, foreign
from llmtop.presets.errors import LlmtopError
from llmtop.presets.tensorfile import BrokenWeights, read_header
from llmtop.profiler.export.importing import import_run
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control, statefile
from llmtop.trainer.change.livefile import LiveFile, LiveRequest
from llmtop.trainer.dsimport.read import import_config
from tests.recorded import make_recorded_run

MOST = 1000


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def loop(path: Path) -> None:
    other = path.with_name(f"{path.name}.other")
    other.symlink_to(path.name)
    path.symlink_to(other.name)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def nowhere(path: Path) -> None:
    path.symlink_to("nothing is here")


def listening(path: Path) -> None:
    # A socket's path may be 108 bytes long at most.
    there = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{there}/{path.name}")
    finally:
        os.close(there)


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 << 30)


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def latin(path: Path) -> None:
    path.write_bytes('{"a": "é"}'.encode("latin-1"))


def wide(path: Path) -> None:
    path.write_bytes('{"a": 1}'.encode("utf-16"))


def empty(path: Path) -> None:
    path.touch()


STRANGE = (fifo, folder, to_itself, loop, zeros, nowhere, listening, large, deep, latin, wide, empty)
Make = Callable[[Path], None]
made = pytest.mark.parametrize("make", STRANGE, ids=lambda make: make.__name__)


@made
def test_a_document_is_read_or_refused_in_words(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    make(path)
    with pytest.raises((OSError, msgspec.DecodeError)) as refused:
        foreign.read_json(path, dict[str, str], MOST)
    error = refused.value
    assert isinstance(error, OSError | msgspec.DecodeError)
    assert len(foreign.why_unreadable(error)) > 8


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    for name in ("a\0b", "\ud800"):
        with pytest.raises(OSError, match="no file can have such a name"):
            foreign.read_bytes(tmp_path / name)
    with pytest.raises(OSError, match="too long"):
        foreign.read_bytes(tmp_path / ("x" * 5000))


def test_a_file_that_grows_while_it_is_read_stays_within_the_limit(tmp_path: Path) -> None:
    # The kernel says of its own files that they are empty.
    assert foreign.read_bytes(Path("/proc/self/status")).startswith(b"Name:")
    with pytest.raises(OSError, match="larger than"):
        foreign.read_bytes(Path("/proc/self/status"), 10)
    exact = tmp_path / "exact"
    exact.write_bytes(b"x" * MOST)
    assert len(foreign.read_bytes(exact, MOST)) == MOST


@made
def test_every_reader_of_a_persons_files_says_what_is_wrong(make: Make, tmp_path: Path) -> None:
    for name, read in (
        ("config.json", lambda path: catalog.load_model(str(path))),
        ("recipe.toml", lambda path: catalog.load_recipe(str(path))),
        ("ds.json", import_config),
        ("run.zip", lambda path: import_run(path, tmp_path / "runs")),
    ):
        path = tmp_path / name
        make(path)
        if name == "recipe.toml" and make is empty:
            continue  # a recipe that changes nothing
        if name == "ds.json" and make in (latin, wide):
            continue  # read all the same, with a warning
        with pytest.raises(LlmtopError) as refused:
            read(path)
        assert refused.value.what and (refused.value.why or refused.value.fix)
    weights = tmp_path / "model.safetensors"
    make(weights)
    with pytest.raises((BrokenWeights, OSError)):
        read_header(weights)


@made
def test_every_document_of_a_run_may_be_anything(make: Make, tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, steps=2)
    for path in (run.spec_path, run.prediction_path, run.deepspeed_path):
        path.unlink()
        make(path)
    with pytest.raises(LlmtopError, match=r"cannot read .*spec\.json"):
        RunDir.open(run.path)
    fresh = RunDir(run.path)
    with pytest.raises(LlmtopError, match=r"prediction\.json"):
        fresh.prediction(0)
    run.supervisor_pid_path.unlink(missing_ok=True)
    make(run.supervisor_pid_path)
    assert run.supervisor_identity() is None and not run.supervisor_alive()


@made
def test_a_checkpoint_whose_marker_is_anything_is_none(make: Make, tmp_path: Path) -> None:
    state = tmp_path / "step-3"
    state.mkdir()
    for name in (statefile.MARKER, statefile.INDEX):
        make(state / name)
    assert statefile.newest(tmp_path) is None
    with pytest.raises(LlmtopError):
        statefile.read_index(state)


# --- whose a request is ----------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_recorded_run(tmp_path, steps=2, end=None)


def refusal(run: RunDir) -> str:
    (asked,) = control.read_requests(run)
    return asked.why if isinstance(asked, control.NotARequest) else ""


def test_a_request_of_another_user_is_refused(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    request_id = control.stop(run, save=True)
    assert refusal(run) == "" and [asked.request_id for asked in control.pending(run)] == [request_id]
    monkeypatch.setattr(foreign, "_SUPERUSER", -1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "belongs to another user" in refusal(run)
    assert control.pending(run) == ()


@pytest.mark.skipif(os.getuid() != 0, reason="only the superuser can give a file away")
def test_a_file_that_was_given_away_is_no_request(run: RunDir) -> None:
    path = run.control_dir / f"{control.stop(run, save=True)}.json"
    os.chown(path, 65534, 65534)
    assert "belongs to another user (uid 65534)" in refusal(run)


def test_a_link_to_a_request_is_none(run: RunDir, tmp_path: Path) -> None:
    path = run.control_dir / f"{control.stop(run, save=True)}.json"
    path.rename(tmp_path / "asked.json")
    path.symlink_to(tmp_path / "asked.json")
    assert "not a regular file" in refusal(run)


@made
def test_anything_in_the_place_of_a_request_is_refused(make: Make, run: RunDir) -> None:
    make(run.control_dir / "1.json")
    found = [asked for asked in control.read_requests(run) if asked.request_id == "1"]
    assert len(found) == 1 and isinstance(found[0], control.NotARequest) and len(found[0].why) > 20


@made
def test_a_rank_goes_on_whatever_lies_where_it_is_asked(make: Make, run: RunDir) -> None:
    file = LiveFile(run)
    run.live_path.write_bytes(msgspec.json.encode(LiveRequest(setting=4)))
    assert file.newest() == LiveRequest(setting=4)
    run.live_path.unlink()
    make(run.live_path)
    assert file.newest() == LiveRequest(setting=4)

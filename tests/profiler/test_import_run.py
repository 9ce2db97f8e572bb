"""An archive is unpacked only when everything in it is as an export writes it."""

from __future__ import annotations

import errno
import os
import stat
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.export import importing
from llmtop.profiler.export.archive import Choices, export_run
from llmtop.profiler.export.importing import import_run
from llmtop.profiler.export.manifest import Manifest
from llmtop.profiler.export.secrets import Scrubber
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import RunEnded
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.imported import Imported, read_imported
from llmtop.profiler.record.processidentity import ProcessIdentity
from llmtop.profiler.record.rundir import RunDir, list_runs
from llmtop.profiler.record.wholefile import document
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.page import run_page
from llmtop.profiler.report.pagedata import read_page
from llmtop.profiler.report.text import render
from llmtop.trainer import control
from llmtop.tui.commands.follow import end_in_words
from tests.recorded import make_recorded_run

Spoil = Callable[[zipfile.ZipFile, str], None]


def exported(folder: Path, *, end: str | None = "completed") -> tuple[RunDir, Path]:
    run = make_recorded_run(folder / "there", kind="cuda", steps=8, end=end)  # type: ignore[arg-type]
    archive = folder / "run.zip"
    export_run(run, archive, choices=Choices(parquet=False), environment={})
    return run, archive


def with_member(
    folder: Path, name: str, content: bytes = b"x", mode: int = 0, *, told_bytes: int | None = -1
) -> Path:
    """A good archive with one more member. The manifest tells of its bytes, or of `told_bytes`."""
    run, archive = exported(folder)
    with zipfile.ZipFile(archive) as good:
        members = {one: good.read(one) for one in good.namelist()}
    last = f"{run.run_id}/manifest.json"
    manifest = msgspec.json.decode(members.pop(last), type=Manifest)
    entry = zipfile.ZipInfo(name.replace("RUN", run.run_id))
    entry.external_attr, entry.compress_type = mode << 16, zipfile.ZIP_DEFLATED
    if told_bytes is not None:
        size = len(content) if told_bytes == -1 else told_bytes
        files = {**manifest.files, entry.filename.partition("/")[2]: size}
        manifest = msgspec.structs.replace(manifest, files=files)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        for one, held in members.items():
            opened.writestr(one, held)
        opened.writestr(entry, content)
        opened.writestr(last, document(manifest))
    return archive


def test_an_imported_run_says_what_the_exported_one_did(tmp_path: Path) -> None:
    run, archive = exported(tmp_path)
    found = import_run(archive, tmp_path / "here")
    assert found.run_id == run.run_id and found.path != run.path
    assert read_state(found) == msgspec.structs.replace(read_state(run), imported=True)
    mine, its = build_report(found), build_report(run)
    assert msgspec.structs.replace(mine, files={}, imported="") == msgspec.structs.replace(its, files={})
    told = msgspec.json.decode(found.imported_path.read_bytes(), type=Imported)
    assert (told.archive, told.status) == (str(archive), "completed")
    assert all(path.stat().st_mode & 0o077 == 0 for path in found.path.rglob("*"))
    again = import_run(archive, tmp_path / "here", name="another")
    assert {one.run_id for one in list_runs(tmp_path / "here")} == {run.run_id, "another"}
    # An imported run can be handed on.
    export_run(again, tmp_path / "again.zip", choices=Choices(parquet=False), environment={})
    third = import_run(tmp_path / "again.zip", tmp_path / "third")
    assert read_state(third).series == read_state(run).series


def test_the_report_and_the_page_of_an_imported_run_say_so(tmp_path: Path) -> None:
    run, archive = exported(tmp_path)
    found = import_run(archive, tmp_path / "here", name="another")
    report = build_report(found)
    assert f"from {archive.name}, recorded on " in report.imported
    assert f" as {run.run_id}, " in report.imported
    text = "".join(render(report).split())
    assert "".join(f"imported {report.imported}".split()) in text
    assert "Imported " in run_page(read_page(found, Scrubber({})))
    own = build_report(run)
    assert own.imported == "" and "imported" not in render(own)
    assert "Imported " not in run_page(read_page(run, Scrubber({})))


def test_nothing_can_be_asked_of_an_imported_run(tmp_path: Path) -> None:
    run, archive = exported(tmp_path, end=None)
    assert run.supervisor_alive()
    found = import_run(archive, tmp_path / "here")
    # Even a file that says so makes no supervisor of a process of this machine.
    found.write_supervisor_pid()
    assert found.is_imported and not found.supervisor_alive() and read_state(found).status == "exported"
    with pytest.raises(LlmtopError, match="takes no requests"):
        control.stop(found, save=False)
    assert not found.control_dir.exists()


def test_a_run_that_went_on_is_not_told_lost_where_it_is_imported(tmp_path: Path) -> None:
    run, archive = exported(tmp_path, end=None)
    assert run.supervisor_alive()
    for one in ("here", "handed-on"):
        found = import_run(archive, tmp_path / one)
        told = read_imported(found)
        assert told is not None and told.went_on
        report = build_report(found)
        assert (report.status, report.reason) == ("exported", "exported while it ran, as far as step 8")
        assert end_in_words(read_state(found)) == report.reason
        assert report.fix == "" and "lost" not in {finding.key for finding in report.findings}
        archive = tmp_path / f"from-{one}.zip"
        export_run(found, archive, choices=Choices(parquet=False), environment={})


@pytest.mark.parametrize("end", ["lost", "failed", "out_of_memory"])
def test_an_imported_run_is_never_to_be_resumed(tmp_path: Path, end: str) -> None:
    run = make_recorded_run(tmp_path / "there", kind="cuda", steps=8, end=None)
    if end == "lost":
        run.supervisor_pid_path.write_bytes(document(ProcessIdentity(pid=1, started_ticks=-1)))
    else:
        fix = f"do less; llmtop resume {run.run_id} goes on after step 5"
        log = EventWriter(run.events_path("supervisor"), "supervisor")
        log.write(RunEnded(state=end, reason="it broke", fix=fix))  # type: ignore[arg-type]
        log.close()
    assert read_state(run).status == end
    archive = tmp_path / "run.zip"
    export_run(run, archive, choices=Choices(parquet=False), environment={})
    found = import_run(archive, tmp_path / "here")
    report = build_report(found)
    assert report.status == end and report.fix
    assert b"llmtop resume" not in msgspec.json.encode((report.fix, report.findings, report.out_of_memory))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("RUN/../outside", 0),
        ("../outside", 0),
        ("RUN/a/../../../outside", 0),
        ("/tmp/outside", 0),
        ("RUN/./x", 0),
        ("RUN//x", 0),
        ("RUN\\..\\outside", 0),
        ("C:/outside", 0),
        ("RUN/a\x01b", 0),
        ("RUN/link.json", stat.S_IFLNK | 0o777),
        ("RUN/device", stat.S_IFCHR | 0o600),
        ("RUN/control/1.json", 0),
        ("RUN/supervisor.pid", 0),
        ("RUN/imported.json", 0),
        ("RUN/remote.json", 0),
        ("RUN/save.json", 0),
        ("RUN/checkpoints/step-1/x.pt", 0),
        ("RUN/.hidden", 0),
        ("RUN/SPEC.JSON", 0),
        ("other/x.json", 0),
        ("x.json", 0),
        ("RUN/" + "d/" * 9 + "x", 0),
    ],
)
def test_a_member_that_no_export_writes_refuses_the_whole(tmp_path: Path, name: str, mode: int) -> None:
    archive = with_member(tmp_path, name, mode=mode)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(LlmtopError) as told:
        import_run(archive, tmp_path / "here")
    assert told.value.fix and "tells of no such file" not in told.value.why
    assert sorted(tmp_path.rglob("*")) == before and not Path("/tmp/outside").exists()


@pytest.mark.parametrize("told_bytes", [None, 2])
def test_a_member_that_the_manifest_does_not_tell_of_refuses_the_whole(
    tmp_path: Path, told_bytes: int | None
) -> None:
    archive = with_member(tmp_path, "RUN/rank-7.jsonl", told_bytes=told_bytes)
    with pytest.raises(LlmtopError, match="not unpacked") as told:
        import_run(archive, tmp_path / "here")
    assert "rank-7.jsonl" in told.value.why and "manifest.json tells of no such file" in told.value.why


def test_what_packs_as_no_run_does_is_taken_where_somebody_says_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "_BOMB_BYTES", 1 << 20)
    archive = with_member(tmp_path, "RUN/zeros.txt", b"\0" * (48 << 20))
    with pytest.raises(LlmtopError, match="not unpacked") as told:
        import_run(archive, tmp_path / "here")
    assert "as those of no run do" in told.value.why and "--limit" in told.value.fix
    import_run(archive, tmp_path / "here", limit_bytes=64 << 20)


def test_sizes_are_looked_at_before_anything_is_unpacked(tmp_path: Path) -> None:
    archive = with_member(tmp_path, "RUN/zeros.txt", b"\0" * (8 << 20))
    with pytest.raises(LlmtopError, match="not unpacked") as told:
        import_run(archive, tmp_path / "here", limit_bytes=4 << 20)
    assert "4.00 MiB are allowed" in told.value.why and "--limit" in told.value.fix
    assert not (tmp_path / "here").exists()
    import_run(archive, tmp_path / "here")


def test_a_member_that_is_larger_than_it_says_is_not_unpacked(tmp_path: Path) -> None:
    archive = with_member(tmp_path, "RUN/zeros.txt", b"\0" * (8 << 20), told_bytes=1 << 10)
    content = archive.read_bytes()
    size = (8 << 20).to_bytes(4, "little")
    assert content.count(size) >= 2
    archive.write_bytes(content.replace(size, (1 << 10).to_bytes(4, "little")))
    with pytest.raises(LlmtopError, match="damaged"):
        import_run(archive, tmp_path / "here", limit_bytes=4 << 20)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.99])
def test_a_cut_archive_is_refused(tmp_path: Path, kept: float) -> None:
    _, archive = exported(tmp_path)
    content = archive.read_bytes()
    archive.write_bytes(content[: int(kept if kept >= 1 else kept * len(content))])
    with pytest.raises(LlmtopError, match="damaged, or no exported run"):
        import_run(archive, tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    run, archive = exported(tmp_path)
    with zipfile.ZipFile(archive) as opened:
        entry = opened.getinfo(f"{run.run_id}/hardware.jsonl")
    content = bytearray(archive.read_bytes())
    content[entry.header_offset + 200] ^= 0xFF
    archive.write_bytes(content)
    with pytest.raises(LlmtopError, match="damaged"):
        import_run(archive, tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_a_file_that_begins_before_the_archive_is_found(tmp_path: Path) -> None:
    _, archive = exported(tmp_path)
    content = bytearray(archive.read_bytes())
    end = content.rindex(b"PK\5\6")
    (begins,) = struct.unpack_from("<I", content, end + 16)
    struct.pack_into("<I", content, end + 16, begins + 100_000)
    archive.write_bytes(content)
    with pytest.raises(LlmtopError, match="is damaged") as refused:
        import_run(archive, tmp_path / "here")
    assert refused.value.why == "a file in it is said to begin before the archive"
    assert not (tmp_path / "here").exists()


def test_an_archive_on_a_drive_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, archive = exported(tmp_path)

    def fails(file: zipfile.ZipExtFile, size: int = -1) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(zipfile.ZipExtFile, "read", fails)
    with pytest.raises(LlmtopError, match="cannot be read") as refused:
        import_run(archive, tmp_path / "here")
    assert refused.value.why == "Input/output error"


def rewritten(archive: Path, name: str, content: bytes | None) -> None:
    """The archive with another content of one member, of which the manifest tells; or without it."""
    with zipfile.ZipFile(archive) as opened:
        members = {one: opened.read(one) for one in opened.namelist()}
    changed = next(one for one in members if one.endswith(f"/{name}"))
    last = f"{changed.partition('/')[0]}/manifest.json"
    manifest = msgspec.json.decode(members[last])
    if content is None:
        del members[changed]
    else:
        members[changed] = content
    if changed != last and content is not None:
        manifest["files"][name] = len(content)
        members[last] = document(manifest)
    with zipfile.ZipFile(archive, "w") as opened:
        for one, held in members.items():
            opened.writestr(one, held)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("manifest.json", None, "no exported run"),
        ("manifest.json", b"{", "damaged"),
        ("manifest.json", b'{"run_id":"x","exported_at":1,"files":{},"format":"cake"}', "no exported run"),
        ("manifest.json", b'{"run_id":"x","exported_at":1,"files":{},"format_version":9}', "newer llmtop"),
        ("spec.json", None, "damaged"),
        ("spec.json", b'{"name":"x"}', "damaged"),
        ("prediction.json", b"[" * 5000, "damaged"),
        ("rank-0.jsonl", None, "damaged"),
    ],
)
def test_documents_are_read_before_anything_is_written(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    _, archive = exported(tmp_path)
    rewritten(archive, name, content)
    with pytest.raises(LlmtopError, match=words):
        import_run(archive, tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_a_run_that_is_called_as_no_folder_may_be_is_refused(tmp_path: Path) -> None:
    run, archive = exported(tmp_path)
    with zipfile.ZipFile(archive) as opened:
        manifest = msgspec.json.decode(opened.read(f"{run.run_id}/manifest.json"))
    rewritten(archive, "manifest.json", document({**manifest, "run_id": "../x"}))
    with pytest.raises(LlmtopError, match="no name of a run"):
        import_run(archive, tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_the_setting_in_force_has_to_be_there(tmp_path: Path) -> None:
    run, _ = exported(tmp_path)
    spec, prediction = run.spec(), run.prediction()
    run.put_in_force(run.add_setting(spec, prediction, {}))
    export_run(run, tmp_path / "b.zip", choices=Choices(parquet=False), environment={})
    assert import_run(tmp_path / "b.zip", tmp_path / "here").in_force().setting == 1
    rewritten(tmp_path / "b.zip", "in-force.json", b'{"setting":7}')
    with pytest.raises(LlmtopError, match="damaged") as told:
        import_run(tmp_path / "b.zip", tmp_path / "there-again")
    assert "setting 7" in told.value.why and not (tmp_path / "there-again").exists()


def test_what_is_no_archive_is_told_in_words(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(LlmtopError, match="no exported run"):
        import_run(text, tmp_path / "here")
    with pytest.raises(UsageError, match="there is no file"):
        import_run(tmp_path / "nothing.zip", tmp_path / "here")
    with pytest.raises(UsageError, match="is a folder"):
        import_run(tmp_path, tmp_path / "here")
    _, archive = exported(tmp_path)
    import_run(archive, tmp_path / "here")
    with pytest.raises(UsageError, match="already"):
        import_run(archive, tmp_path / "here")
    for name in ("..", "a/b", ".x", "-x", "", "a\nb"):
        with pytest.raises(UsageError, match="no name of a run"):
            import_run(archive, tmp_path / "here", name=name)


def test_a_list_of_files_beyond_any_run_is_not_made(tmp_path: Path) -> None:
    """Empty members with long names: 10 MB of list, of which Python would make several times as much."""
    archive = tmp_path / "many.zip"
    with zipfile.ZipFile(archive, "w") as made:
        for number in range(40_000):
            made.writestr(f"r/{number:0200}", b"")
    tracemalloc.start()
    with pytest.raises(LlmtopError, match="list of files is longer"):
        import_run(archive, tmp_path / "runs")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20

"""Targets that are read of a run: its documents, events, requests, checkpoints, archives and caches."""

from __future__ import annotations

import shutil
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.fuzzing.logs import event, sound
from benchmarks.fuzzing.making import Maker, Pairs
from benchmarks.fuzzing.target import Target
from llmtop.presets.spec import RunSpec
from llmtop.presets.tensorfile import read_header
from llmtop.presets.weightfiles import packed_weights, safetensors_files, stored_tensors
from llmtop.profiler.export.archive import Choices, export_run
from llmtop.profiler.export.environment import recorded_environment
from llmtop.profiler.export.importing import import_run
from llmtop.profiler.export.secrets import Scrubber
from llmtop.profiler.findings.finding import Finding
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.mirrors.openmetrics import RunsCollector
from llmtop.profiler.record.feed import RunReader, read_state
from llmtop.profiler.record.rundir import InForce, RunDir
from llmtop.profiler.record.snapshotevents import SnapshotParams
from llmtop.profiler.report.build import report_of
from llmtop.profiler.report.history import read_history
from llmtop.profiler.report.keptlooks import Look, LookedAt, keep_looks, read_looks
from llmtop.profiler.report.page import run_page
from llmtop.profiler.report.pagedata import page_of
from llmtop.profiler.report.text import render
from llmtop.profiler.snapshots.reading import Table, lines_of
from llmtop.trainer import control, statefile
from llmtop.trainer.tune import journal
from llmtop.tui.commands import ls
from llmtop.tui.commands.follow import Narrator, end_in_words
from llmtop.tui.commands.plain import PlainTeller
from tests.recorded import make_recorded_run
from tests.tui.pictured import changed_run

_BASE = "base"
_SAMPLES_STEP = 16
_LOGS = ("supervisor", "hardware", "rank0", "rank1")
_LOOKS = (Look(at=1.0, setting=0, first=1, last=9, ends=False),)


def _make_bases(place: Path) -> None:
    """Whole records that cases are made from."""
    folder = place / _BASE
    if folder.exists():
        shutil.rmtree(folder)
    make_recorded_run(folder / "cpu", steps=6)
    make_recorded_run(folder / "cuda", kind="cuda", steps=6, end="out_of_memory")
    changed = changed_run(folder / "changed").events_path("hardware")
    # A case is every view of a record, which takes the longer the more samples it has.
    changed.write_bytes(b"".join(changed.read_bytes().splitlines(keepends=True)[::_SAMPLES_STEP]))
    for run in sorted(folder.glob("*/*")):
        export_run(
            RunDir(run), folder / f"{run.parent.name}.zip", choices=Choices(parquet=False), environment={}
        )
    _base_runs.cache_clear()


@cache
def _base_runs(place: Path) -> tuple[Path, ...]:
    return tuple(sorted((place / _BASE).glob("*/*-*")))


def _copied(maker: Maker, folder: Path) -> RunDir:
    source = maker.draw.choice(_base_runs(folder.parent))
    target = folder / "runs" / source.name
    shutil.copytree(source, target)
    return RunDir(target)


def _only(folder: Path) -> RunDir:
    (path,) = (folder / "runs").iterdir()
    return RunDir(path)


def seen_everywhere(run: RunDir) -> None:
    """What every view of a run makes of its record."""
    opened = RunDir.open(run.path)
    ls._cells(ls._line(opened))
    reader = RunReader(opened)
    state = reader.poll()
    report = report_of(opened, state)
    assert render(report)
    msgspec.json.encode(report)
    setting = state.changes.setting
    spec, prediction = opened.spec(setting), opened.prediction(setting)
    list(Narrator(spec, prediction).lines(state, 0.0))
    list(PlainTeller(opened).lines(state, time.time()))
    end_in_words(state)
    _metrics(run)
    if zlib.crc32(run.spec_path.read_bytes()[:500] + run.events_path(0).read_bytes()[-500:]) % 4 == 0:
        run_page(page_of(opened, state, read_history(opened), Scrubber({})))


def _metrics(run: RunDir) -> None:
    for metric in RunsCollector(run.path.parent, run).collect():
        assert all(isinstance(sample.value, float) for sample in metric.samples)


# --- events ------------------------------------------------------------------------------------------


def _make_events(maker: Maker, folder: Path) -> None:
    run = _copied(maker, folder)
    logs = [run.events_path(name) for name in _LOGS if run.events_path(name).exists()]
    for _ in range(maker.draw.choice((1, 1, 2, 4, 8))):
        log = maker.draw.choice(logs)
        lines = log.read_bytes().split(b"\n")
        at = maker.draw.randrange(len(lines))
        act = maker.draw.randrange(6)
        if act <= 2:
            lines.insert(at, event(maker))
        elif act == 3 and lines[at].strip():
            lines[at] = maker.json_of(maker.spoilt(sound(lines[at])))
        elif act == 4:
            lines[at] = maker.bytes_of(lines[at])
        else:
            del lines[at]
        log.write_bytes(b"\n".join(lines))


def _act_events(folder: Path) -> None:
    seen_everywhere(_only(folder))


# --- documents ----------------------------------------------------------------------------------------


def _spoil_file(maker: Maker, path: Path, kind: Any) -> None:
    if path.exists() and maker.chance(0.6):
        value = maker.spoilt(msgspec.json.decode(path.read_bytes()))
    else:
        value = maker.of(kind)
        value = maker.spoilt(dict(value)) if maker.chance(0.2) and isinstance(value, Pairs) else value
    path.write_bytes(maker.json_of(value))


def _make_documents(maker: Maker, folder: Path) -> None:
    run = _copied(maker, folder)
    which: list[tuple[Path, Any]] = [
        (run.spec_path, RunSpec),
        (run.prediction_path, Prediction),
        (run.deepspeed_path, dict[str, Any]),
        (run.path / "in-force.json", InForce),
        (run.supervisor_pid_path, dict[str, Any]),
        (run.environment_path, dict[str, Any]),
        (run.imported_path, dict[str, Any]),
    ]
    path, kind = maker.draw.choice((*which, *which[:2]))
    _spoil_file(maker, path, kind)


def _act_documents(folder: Path) -> None:
    run = _only(folder)
    recorded_environment(run)
    run.supervisor_alive()
    run.deepspeed_config()
    seen_everywhere(run)


# --- requests ------------------------------------------------------------------------------------------


def _make_request(maker: Maker, folder: Path) -> None:
    control_dir = folder / "control"
    control_dir.mkdir()
    params: Any = maker.of(maker.draw.choice((control.SetParams, SnapshotParams, dict[str, Any])))
    value = Pairs(
        (
            ("request_id", "1"),
            ("action", maker.draw.choice((*control.ACTIONS, *control.ACTIONS, "reboot", ""))),
            ("params", params),
        )
    )
    asked = maker.spoilt(value) if maker.chance(0.5) else value
    (control_dir / "1.json").write_bytes(maker.json_of(asked))


def _act_request(folder: Path) -> None:
    from llmtop.trainer.change.setwords import set_words

    for asked in control.read_requests(RunDir(folder)):
        if isinstance(asked, control.NotARequest):
            assert len(asked.why) > 20
        elif asked.action == control.SET:
            for word in control.set_params(asked).words:
                set_words(word)
        elif asked.action == control.SNAPSHOT:
            control.snapshot_params(asked)


# --- weights and states ----------------------------------------------------------------------------------


def _make_safetensors(maker: Maker, folder: Path) -> None:
    draw = maker.draw
    entries = Pairs()
    at = 0
    for number in range(draw.randrange(4)):
        width, dtype = draw.choice(((4, "F32"), (2, "BF16"), (1, "U8"), (1, "F8_E4M3")))
        shape = [draw.randrange(4) for _ in range(draw.randrange(3))]
        size = width
        for length in shape:
            size *= length
        entry = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        entries.append((f"layer.{number}.weight", entry))
        at += size
    entries.append(("__metadata__", {"format": "pt"}))
    text = maker.json_of(maker.spoilt(entries) if maker.chance(0.8) else entries)
    length = (
        len(text) if maker.chance(0.85) else draw.choice((0, 7, 1 << 20, 1 << 62, (1 << 64) - 1, 99_999_999))
    )
    content = struct.pack("<Q", length) + text + b"\1" * (at + draw.choice((0, 0, 0, 1, -1)))
    name = "model.safetensors" if maker.chance(0.7) else "model-00001-of-00001.safetensors"
    (folder / name).write_bytes(maker.bytes_of(content) if maker.chance(0.15) else content)
    if name != "model.safetensors":
        index: Any = {"weight_map": {"layer.0.weight": name, "layer.1.weight": name}}
        index = maker.spoilt(index) if maker.chance(0.6) else index
        (folder / "model.safetensors.index.json").write_bytes(maker.json_of(index))


def _act_safetensors(folder: Path) -> None:
    try:
        files = safetensors_files(folder)
    except FileNotFoundError:
        return  # `check_weights` tells it, with the names
    stored = stored_tensors(files)
    packed_weights(stored)
    assert all(tensor.size_bytes >= 0 for tensor in stored.values())
    for file in files:
        read_header(file)


def _make_state(maker: Maker, folder: Path) -> None:
    state = folder / "step-4"
    state.mkdir()
    (state / "rank-00000.safetensors").write_bytes(b"x" * 40)
    marker: Any = maker.of(statefile.Progress)
    if maker.chance(0.5):
        position = {"epoch": 0, "index": 32}
        marker = {"step": 4, "position": position, "world_size": 2, "files": {"rank-00000.safetensors": 40}}
    (state / statefile.MARKER).write_bytes(
        maker.json_of(maker.spoilt(marker) if maker.chance(0.6) else marker)
    )
    index = maker.of(statefile.StateIndex)
    index = maker.spoilt(index) if maker.chance(0.4) else index
    (state / statefile.INDEX).write_bytes(maker.json_of(index))


def _act_state(folder: Path) -> None:
    statefile.newest(folder)
    index = statefile.read_index(folder / "step-4")
    assert all(size >= 0 or True for size in index.stored_bytes().values())
    msgspec.json.encode(index)


# --- archives, searches, snapshots, bookmarks ----------------------------------------------------------


def _make_archive(maker: Maker, folder: Path) -> None:
    source = maker.draw.choice(sorted((folder.parent / _BASE).glob("*.zip")))
    target = folder / "run.zip"
    if maker.chance(0.4):
        target.write_bytes(maker.bytes_of(source.read_bytes()))
        return
    with zipfile.ZipFile(source) as whole, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as spoilt:
        entries = whole.infolist()
        chosen = maker.draw.randrange(len(entries))
        for number, entry in enumerate(entries):
            content = whole.read(entry)
            if number == chosen:
                entry, content = _spoilt_member(maker, entry, content)
            if number != chosen or maker.chance(0.9):
                spoilt.writestr(entry, content)


def _spoilt_member(maker: Maker, entry: zipfile.ZipInfo, content: bytes) -> tuple[zipfile.ZipInfo, bytes]:
    act = maker.draw.randrange(5)
    if act == 0:
        root = entry.filename.partition("/")[0]
        names = (
            "../x",
            "/etc/x",
            "a/../../x",
            "a\\b",
            ".hidden",
            "control/1.json",
            "x" * 300,
            "\x1b[31m",
            "a//b",
            "",
        )
        entry.filename = f"{root}/{maker.draw.choice(names)}"
    elif act == 1:
        entry.external_attr = maker.draw.choice((0o120777, 0o010644, 0o020644, 0o104755, 0o060644)) << 16
    elif act == 2 and entry.filename.endswith(".json"):
        return entry, maker.json_of(maker.spoilt(msgspec.json.decode(content)))
    elif act == 3:
        return entry, b"\0" * (1 << maker.draw.randrange(8, 24))
    else:
        return entry, maker.bytes_of(content)
    return entry, content


def _act_archive(folder: Path) -> None:
    run = import_run(folder / "run.zip", folder / "runs")
    assert run.path.parent == folder / "runs" and run.is_imported
    assert {path.name for path in folder.iterdir()} == {"run.zip", "runs"}
    seen_everywhere(run)


def _make_search(maker: Maker, folder: Path) -> None:
    lines = [maker.json_of(maker.of(journal.Line)) for _ in range(maker.draw.randrange(6))]
    (folder / "journal.jsonl").write_bytes(b"\n".join(lines))
    value = maker.of(journal.Asked)
    (folder / "tune.json").write_bytes(maker.json_of(maker.spoilt(value) if maker.chance(0.5) else value))
    (folder / "search.pid").write_bytes(maker.json_of(maker.anything()))


def _act_search(folder: Path) -> None:
    from llmtop.tui.commands.tune_text import trials_text

    search = journal.TuneDir(folder)
    search.holder()
    ended = search.ended()
    search.open_trial()
    if ended and len({frozenset(line.choice) for line in ended}) == 1:
        trials_text(ended, 80)
    search.asked()


def _make_table(maker: Maker, folder: Path) -> None:
    (folder / "table.json").write_bytes(maker.json_of(maker.of(Table)))


def _act_table(folder: Path) -> None:
    from llmtop.presets.foreign import read_json
    from llmtop.profiler.record.snapshotevents import SnapshotTaken

    taken = SnapshotTaken(src="rank0", number=1, what="trace", step=1, seconds=0.1, stall_seconds=0.1)
    try:
        table: Any = read_json(folder / "table.json", Table)  # type: ignore[arg-type]
    except msgspec.DecodeError:
        return
    list(lines_of(RunDir(folder), taken, table))


def _make_bookmark(maker: Maker, folder: Path) -> None:
    from llmtop.profiler.fold.folding import fold
    from llmtop.profiler.record.bookmark import write_bookmark
    from llmtop.profiler.record.feed import open_stream

    run = _copied(maker, folder)
    stream, state = open_stream(run)
    assert write_bookmark(run, stream.bookmark(fold(state, stream.poll())))
    content = run.bookmark_path.read_bytes()
    head, _, body = content.partition(b"\n")
    if maker.chance(0.5):
        run.bookmark_path.write_bytes(maker.bytes_of(content))
        return
    # With sums that are right: whoever has made it knows how.
    body = maker.bytes_of(body)
    told = msgspec.json.decode(head[8:])
    told["body"] = zlib.crc32(body)
    line = maker.json_of(maker.spoilt(told) if maker.chance(0.5) else told)
    run.bookmark_path.write_bytes(b"%08x" % zlib.crc32(line) + line + b"\n" + body)


def _act_bookmark(folder: Path) -> None:
    from llmtop.profiler.record.bookmark import ended_summary

    run = _only(folder)
    ended_summary(run)
    read_state(run)


def _make_looks(maker: Maker, folder: Path) -> None:
    run = _copied(maker, folder)
    finding = Finding(key="gpu_hot", severity="warning", title="t", evidence="e", change="c")
    keep_looks(run, RunState(status="completed"), _LOOKS, (LookedAt(_LOOKS[0], (finding,)),), 1 << 40)
    content = run.looks_path.read_bytes()
    spoilt = maker.json_of(maker.spoilt(sound(content))) if maker.chance(0.5) else maker.bytes_of(content)
    run.looks_path.write_bytes(spoilt)


def _act_looks(folder: Path) -> None:
    read_looks(_only(folder), _LOOKS)


def _target(
    name: str, make: Callable[[Maker, Path], None], act: Callable[[Path], None], share: float
) -> Target:
    return Target(name=name, make=make, act=act, prepare=_make_bases, share=share)


TARGETS = (
    _target("events of a run", _make_events, _act_events, 0.4),
    _target("documents of a run", _make_documents, _act_documents, 0.4),
    _target("archive to import", _make_archive, _act_archive, 0.4),
    _target("bookmark", _make_bookmark, _act_bookmark, 0.4),
    _target("kept looks of a report", _make_looks, _act_looks, 0.4),
    Target(name="control requests", make=_make_request, act=_act_request),
    Target(name="safetensors header", make=_make_safetensors, act=_act_safetensors, share=1.5),
    Target(name="checkpoint marker and index", make=_make_state, act=_act_state),
    Target(name="search's journal", make=_make_search, act=_act_search, share=0.5),
    Target(name="snapshot's table", make=_make_table, act=_act_table),
)

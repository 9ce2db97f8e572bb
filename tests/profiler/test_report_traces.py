"""A run's page has pictures of its traces, and what a trace calls things stays text."""

from __future__ import annotations

from pathlib import Path

import msgspec

from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotFile, SnapshotKind, SnapshotTaken
from llmtop.profiler.snapshots.collectives import Collective
from llmtop.profiler.snapshots.modules import ModuleRow, ModuleTable
from llmtop.profiler.snapshots.tracesummary import Part, TopOperation, TraceSummary
from tests.profiler.test_report_page import EVIL, Parsed, page_of_run, require_harmless
from tests.recorded import make_recorded_run

PLOTS = {"Where the time went", "What it computed for", "Longest kernels", "Collectives"}
LONG = "void cutlass::" + "very_" * 20 + "long_kernel"


def trace(**fields: object) -> TraceSummary:
    values: dict[str, object] = {
        "rank": 0,
        "world_size": 2,
        "on_device": True,
        "step": 7,
        "steps": 2,
        "wall_seconds": 1.0,
        "compute_seconds": 0.6,
        "communication_seconds": 0.3,
        "memcpy_seconds": 0.05,
        "idle_seconds": 0.15,
        "overlapped_seconds": 0.1,
        "overlap_share": 1 / 3,
        "parts": [
            Part(name="attention", seconds=0.4, share=2 / 3),
            Part(name="new", seconds=0.2, share=1 / 3),
        ],
        "top": [
            TopOperation(name=LONG, part="attention", seconds=0.4, calls=3),
            TopOperation(name=EVIL, part=EVIL, seconds=0.2, calls=1),
        ],
        "collectives": [
            Collective(
                name="all_reduce",
                calls=4,
                seconds=0.3,
                shortest_seconds=0.05,
                size_bytes=1 << 20,
                group_size=2,
                bus_bytes_per_second=4 * 2.0**30,
                best_bus_bytes_per_second=5 * 2.0**30,
            )
        ],
    }
    return msgspec.convert(msgspec.to_builtins({**values, "type": "trace", **fields}), TraceSummary)


def took(run: RunDir, what: SnapshotKind, ending: str, table: object) -> None:
    run.snapshots_dir.mkdir(exist_ok=True)
    number = len(list(run.snapshots_dir.iterdir())) + 1
    path = run.snapshots_dir / f"{number}-rank-0-{what}{ending}"
    path.write_bytes(msgspec.json.encode(table))
    file = SnapshotFile(name=str(path.relative_to(run.path)), size_bytes=path.stat().st_size)
    with EventWriter(run.events_path(0), "rank0") as writer:
        writer.write(SnapshotTaken(number=number, what=what, step=7, files=(file,)))


def plots(parsed: Parsed) -> list[str]:
    return [str(a["aria-label"]) for name, a in parsed.elements if name == "svg"]


def test_a_trace_is_drawn(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, kind="cuda", steps=4)
    took(run, "trace", ".summary.json", trace())
    parsed = require_harmless(page_of_run(run)[1])
    assert set(plots(parsed)) >= PLOTS
    assert ("a", {"href": "#looked-at"}) in parsed.elements
    # A name that is too long for its bar is whole in the bar's title.
    assert f"{LONG} (attention, 3 calls): 400 ms" in parsed.text
    for words in (
        "while something computed: 100 ms",
        "alone: 200 ms",
        "600 ms, 60",
        "4.00 GiB/s",
        "5.00 GiB/s",
    ):
        assert words in parsed.text


def test_shares_are_drawn_to_one_scale(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, kind="cuda", steps=4)
    took(run, "trace", ".summary.json", trace(communication_seconds=0.3, overlapped_seconds=0.3))
    page = page_of_run(run)[1]
    plot = page.partition('aria-label="Where the time went"')[2].partition("</svg>")[0]
    found = [float(part.partition('"')[0]) for part in plot.split('width="')[1:]]
    # Compute, communication all of it beside, copies, idle.
    assert [round(width / found[0], 2) for width in found] == [1.0, 0.5, 0.08, 0.25]


def test_other_snapshots_are_text_and_a_run_without_any_has_no_such_part(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, kind="cpu", steps=4)
    assert 'id="looked-at"' not in page_of_run(run)[1]
    row = ModuleRow(
        name=EVIL,
        kind="LlamaMLP",
        calls=2,
        forward_seconds=0.1,
        backward_seconds=None,
        parameter_bytes=1 << 20,
        saved_bytes=1 << 21,
    )
    took(run, "modules", ".json", ModuleTable(rank=0, step=7, step_seconds=0.5, rows=(row,)))
    parsed = require_harmless(page_of_run(run)[1])
    assert not PLOTS & set(plots(parsed)) and "LlamaMLP" in parsed.text


def test_many_traces_are_not_all_drawn(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, kind="cuda", steps=4)
    for _ in range(11):
        took(run, "trace", ".summary.json", trace(on_device=False, collectives=[]))
    data, page = page_of_run(run)
    parsed = require_harmless(page)
    assert plots(parsed).count("Longest operators") == 8 and "Collectives" not in plots(parsed)
    assert "3 earlier ones not shown" in parsed.text and len(data.report.snapshots) == 11

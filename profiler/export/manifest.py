"""What an archive says of itself."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from llmtop.profiler.export.contents import LeftOut

if TYPE_CHECKING:
    from llmtop.profiler.report.pagedata import PageData  # to read an archive takes none of it

FORMAT = "llmtop-run"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"


class Manifest(Struct, frozen=True, kw_only=True):
    """The last member of an archive."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    """A reader takes none that is newer than its own."""
    run_id: str
    name: str = ""
    status: str = ""
    """When it was exported."""
    host: str = ""
    llmtop_version: str = ""
    """That made the run."""
    exported_at: float
    """Wall clock."""
    files: dict[str, int]
    """Name to bytes."""
    left_out: tuple[LeftOut, ...] = ()
    secrets_removed: int = 0


_WORDS: dict[str, str] = {
    "report.html": "the report with plots: open it in a browser, it needs no network",
    "report.json": "the same as data",
    "environment.json": "versions, driver, GPUs and how they are connected; secrets as [removed]",
    "spec.json": "the resolved options of the run",
    "prediction.json": "what was predicted before it was launched",
    "deepspeed.json": "the DeepSpeed configuration that it trained with",
    "memory.csv": "memory by moment and component, predicted and measured",
    "metrics/": "steps, devices, host and processes, a row each time they were measured",
    "findings.json": "what stands out, with evidence and what to do",
    "changes.json": "what was changed while it ran",
    "settings/": "the same documents after each change",
    "supervisor.jsonl": "events of the run as a whole",
    "hardware.jsonl": "samples of the hardware",
    "rank-0.jsonl": "events of a rank: one file each",
    "rank-0.log": "what a rank wrote: one file each",
}


def readme(sizes: Mapping[str, int], left_out: Sequence[LeftOut]) -> str:
    """For somebody who opens the archive without llmtop."""
    lines = ["A training run, exported by llmtop. `llmtop import-run FILE` opens it on another machine.", ""]
    for name, words in _WORDS.items():
        if any(known == name or known.startswith(name) for known in sizes):
            lines.append(f"  {name:<20}{words}")
    if left_out:
        lines += ["", "Not in it:"]
        lines += [f"  {left.in_words}" for left in left_out]
    return "\n".join(lines) + "\n"


def memory_csv(data: PageData) -> str:
    """Moment, component and bytes on both sides; empty where one side does not know the component."""
    predicted = {
        (str(m.name), str(part)): size for m in data.predicted for part, size in m.components.items()
    }
    measured = {(m.name, str(part)): size for m in data.measured for part, size in m.components.items()}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("moment", "component", "predicted_bytes", "measured_bytes"))
    for moment, part in dict.fromkeys((*predicted, *measured)):
        writer.writerow((moment, part, predicted.get((moment, part)), measured.get((moment, part))))
    return text.getvalue()

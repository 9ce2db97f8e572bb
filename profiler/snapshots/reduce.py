"""Turns the trace that a rank wrote into what is kept.

`python -m llmtop.profiler.snapshots.reduce RAW OUT STEP STEPS` writes `OUT.json.gz` and `OUT.summary.json`
and removes RAW. A process of its own, so that the rank goes on training: the last line of its output is a
word for the rank, empty when all went well.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from pathlib import Path

import msgspec

from llmtop.profiler.record.wholefile import document, write_atomic
from llmtop.profiler.snapshots.tracefile import read_trace
from llmtop.profiler.snapshots.tracesummary import summarise
from llmtop.profiler.units import format_bytes

MOST_RAW_BYTES = 2 * 1024**3
"""Of a trace that is summarised: reading it takes several times as much memory."""
MOST_KEPT_BYTES = 256 * 1024**2
"""Of a compressed trace: browsers do not open larger ones."""
_LEVEL = 5
_NICE = 10


def trace_path(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}.json.gz")


def summary_path(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}.summary.json")


def reduce(raw: Path, stem: Path, *, step: int, steps: int) -> str:
    """What went wrong, in words; empty when both files are there."""
    try:
        return _reduce(raw, stem, step, steps)
    except OSError as error:
        return f"the trace cannot be written: {error.strerror or error}"
    except msgspec.MsgspecError as error:
        return f"the trace is cut short, as on a full disk: {error}"
    finally:
        raw.unlink(missing_ok=True)


def _reduce(raw: Path, stem: Path, step: int, steps: int) -> str:
    size = raw.stat().st_size
    if size > MOST_RAW_BYTES:
        most = format_bytes(MOST_RAW_BYTES)
        return f"the trace has {format_bytes(size)}, more than {most}: ask for fewer steps"
    summary = summarise(read_trace(raw), step=step, steps=steps)
    write_atomic(summary_path(stem), document(summary))
    kept = trace_path(stem)
    aside = kept.with_name(f".{kept.name}.new")
    try:
        with raw.open("rb") as source, aside.open("xb") as target:
            os.fchmod(target.fileno(), 0o600)
            with gzip.GzipFile(filename="", fileobj=target, mode="wb", compresslevel=_LEVEL) as packed:
                shutil.copyfileobj(source, packed, 1 << 20)
        packed_bytes = aside.stat().st_size
        if packed_bytes > MOST_KEPT_BYTES:
            return (
                f"the trace has {format_bytes(packed_bytes)} compressed, more than"
                f" {format_bytes(MOST_KEPT_BYTES)}: only its summary is kept; ask for fewer steps"
            )
        aside.replace(kept)
    finally:
        aside.unlink(missing_ok=True)
    return ""


def main(arguments: list[str]) -> int:
    raw, stem, step, steps = arguments
    os.nice(_NICE)
    sys.stdout.write(f"{reduce(Path(raw), Path(stem), step=int(step), steps=int(steps))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

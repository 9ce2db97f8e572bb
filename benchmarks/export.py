"""Time and size of the archive of a long run, of its page, and of opening it again.

    python -m benchmarks.export [--steps 100000] [--ranks 2] [--rounds 3] [--out FILE]

Records a run (a step a second on H200s, a sample every other second), then calls the command line as anybody
would, each time in a process of its own: so its start is counted. Prints and appends one JSON line a figure.
The first export finds no bookmark and folds the whole record; the others may find one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from benchmarks.ui_runs import make_long_run
from llmtop.profiler.record.rundir import RunDir


def called(root: Path, *words: str) -> dict[str, Any]:
    """One call of the command line: seconds by the clock and of processors, and its largest resident set."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "llmtop.tui.cli", *words],
        env={**os.environ, "LLMTOP_RUNS_DIR": str(root)},
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
    return {
        "load": round(os.getloadavg()[0], 2),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "nice": os.nice(0),
        "wall_seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_rss_bytes": used.ru_maxrss * 1024,
    }


def figures(root: Path, run: RunDir, folder: Path, rounds: int) -> list[dict[str, Any]]:
    archive, page = folder / "run.zip", folder / "run.html"
    rows: list[dict[str, Any]] = []
    ways: dict[str, tuple[str, ...]] = {"export": (), "export, CSV alone": ("--no-parquet",)}
    for name, options in ways.items():
        for number in range(rounds):
            if number == 0:
                run.bookmark_path.unlink(missing_ok=True)
            took = called(root, "export", run.run_id, "--out", str(archive), "--force", *options)
            with zipfile.ZipFile(archive) as opened:
                entries = {e.filename.partition("/")[2]: e.file_size for e in opened.infolist()}
            rows.append(
                {
                    "figure": name,
                    "bookmark": number > 0,
                    **took,
                    "archive_bytes": archive.stat().st_size,
                    "unpacked_bytes": sum(entries.values()),
                    "page_bytes": entries["report.html"],
                }
            )
    took = called(root, "report", run.run_id, "--html", str(page))
    rows.append({"figure": "report --html", **took, "page_bytes": page.stat().st_size})
    took = called(folder / "imported", "import-run", str(archive))
    rows.append({"figure": "import-run", **took})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "export.jsonl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="llmtop-export-") as name:
        folder = Path(name)
        run = make_long_run(folder / "runs", steps=args.steps, ranks=args.ranks, sample_every=2)
        record = sum(path.stat().st_size for path in run.path.glob("*.jsonl"))
        machine = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        for row in figures(folder / "runs", run, folder, args.rounds):
            told = {"steps": args.steps, "ranks": args.ranks, "record_bytes": record, **row, **machine}
            line = json.dumps(told)
            print(line)
            with args.out.open("a") as log:
                log.write(line + "\n")


if __name__ == "__main__":
    main()

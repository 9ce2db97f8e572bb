"""Bad input for everything that llmtop reads: no traceback, no hang, memory bounded, each refusal told.

    python -m benchmarks.fuzz [--cases 1000000] [--minutes 60] [--target WORDS ...] [--engine hypothesis]

A case is made from its number and so is the same again: `--show TARGET NUMBER` runs one and shows its input.
Cases run in a process of their own, some thousand at a time; one that takes more than `CASE_SECONDS` of its
processor's time or `CASE_BYTES` of memory has failed, as has one that ends in anything but a refusal of ours
that says what is wrong. One JSON line for each part is added to `results/fuzz.jsonl`; parts that are there
are left out, so it goes on where it was. `--summary` adds the lines up. With `--engine hypothesis` the dice
are Hypothesis's, which tries what is small or odd first; with `--engine atheris` inputs are changed further
that reach new lines of the product, and `--show TARGET INPUT` runs one that has failed, as its row has it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.fuzzing import guided, hypothetical, large
from benchmarks.fuzzing.running import CASE_SECONDS, run_part, show
from benchmarks.fuzzing.table import TARGETS
from benchmarks.fuzzing.target import Target
from llmtop.profiler.units import format_bytes, format_seconds

RESULTS = Path(__file__).parent / "results" / "fuzz.jsonl"
PART = 10_000
"""Cases of one process, at a share of 1."""
_GUIDED_PARTS = 5
"""As many times more where the process takes so long to begin: each line of ours is made to be counted."""
_POLL_SECONDS = 0.5
_STUCK_SECONDS = 60.0
"""By the clock: what is stuck in a call that no signal interrupts."""
_BEGIN_SECONDS = 600.0
"""By the clock, to its first case: to have each line counted takes a busy machine minutes."""
_NOT_BEGUN = (1 << 64) - 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1_000_000, help="over all targets")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--target", nargs="*", default=[], metavar="WORDS", help="those whose name has the words"
    )
    parser.add_argument("--engine", choices=("seeded", "hypothesis", "atheris"), default="seeded")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--large", action="store_true", help="files of 100 MB instead, 24 for each reader")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--show", nargs=2, metavar=("TARGET", "CASE"))
    parser.add_argument("--part", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return _child(*args.part)
    if args.show:
        return show(*args.show)
    if args.summary:
        return summary(_rows(args.out))
    if args.engine == "atheris" and importlib.util.find_spec("atheris") is None:
        parser.error(guided.HOW_TO_GET_IT)
    table = large.TARGETS if args.large else TARGETS
    cases = 24 * len(table) if args.large else args.cases
    run_all(args.out, cases, args.minutes, args.target, args.engine, table)
    return summary(_rows(args.out))


def run_all(
    out: Path,
    cases: int,
    minutes: float,
    words: list[str],
    engine: str,
    table: tuple[Target, ...] = TARGETS,
) -> None:
    """Every target gets its share, a part of each in turn."""
    end = time.monotonic() + 60 * minutes
    chosen = [target for target in table if not words or any(word in target.name for word in words)]
    part_cases = PART * (_GUIDED_PARTS if engine == "atheris" else 1)
    unit = cases / sum(target.share for target in chosen)
    wanted = {target.name: round(unit * target.share) for target in chosen}
    done = Counter[str]()
    for row in _rows(out):
        if row["engine"] == engine:
            done[row["target"]] = max(done[row["target"]], row["first"] + row["cases"])
    # In memory where the machine has such a place: a case is a few small files.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        while time.monotonic() < end and any(done[name] < wanted[name] for name in wanted):
            for target in chosen:
                count = min(round(part_cases * target.share), wanted[target.name] - done[target.name])
                if count <= 0 or time.monotonic() >= end:
                    continue
                row = part(target.name, done[target.name], count, engine, Path(place))
                done[target.name] += row["cases"]
                _append(out, row)


def part(name: str, first: int, count: int, engine: str, place: Path) -> dict[str, Any]:
    """One process's share of a target, and what came of it; a case that kills it is one that has failed."""
    at_path = place / "at"
    at_path.write_bytes(struct.pack("<Q", _NOT_BEGUN))
    words = [name, str(first), str(count)]
    is_guided = engine == "atheris"
    own = [guided.MODULE, *words] if is_guided else ["benchmarks.fuzz", "--part", *words, engine]
    command = [sys.executable, "-m", *own, str(place)]
    with at_path.open("r+b") as file, mmap.mmap(file.fileno(), 8) as at:
        # Into files: whoever says much (libFuzzer does) must not wait for a reader.
        with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(command, stdout=said, stderr=errors)
            killed = _watched(child, at)
            said.seek(0)
            errors.seek(0)
            stdout, stderr = said.read(), errors.read()
        noted = struct.unpack("<Q", at[:8])[0]
        seed = first if noted == _NOT_BEGUN else noted
    if child.returncode == 0:
        found: dict[str, Any] = json.loads(stdout.splitlines()[-1])
        edges = {"edges": guided.told_edges(stderr)} if is_guided else {}
        return {**_about(name, first, engine), **found, **edges}
    what = "hang" if killed else f"ended with {child.returncode}"
    failure = {"case": seed, "error": what, "where": stderr.strip()[-1500:]}
    return {**_about(name, first, engine), "cases": max(1, seed - first + 1), "failures": [failure]}


def _watched(child: subprocess.Popen[bytes], at: mmap.mmap) -> bool:
    """Wait for a process; end one that stays at a case. Whether it was ended."""
    seen, since = at[:8], time.monotonic()
    while True:
        try:
            child.wait(_POLL_SECONDS)
            return False
        except subprocess.TimeoutExpired:
            pass
        if at[:8] != seen:
            seen, since = at[:8], time.monotonic()
        elif time.monotonic() - since > _most_seconds(seen):
            child.send_signal(signal.SIGABRT)  # faulthandler says where
            child.wait()
            return True


def _most_seconds(seen: bytes) -> float:
    begun = struct.unpack("<Q", seen)[0] != _NOT_BEGUN
    return _STUCK_SECONDS + CASE_SECONDS if begun else _BEGIN_SECONDS


def _child(name: str, first: str, count: str, engine: str, place: str) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    target = next(target for target in (*TARGETS, *large.TARGETS) if target.name == name)
    with (Path(place) / "at").open("r+b") as file, mmap.mmap(file.fileno(), 8) as at:

        def note(number: int) -> None:
            at[:8] = struct.pack("<Q", number)

        work = hypothetical.run_part if engine == "hypothesis" else run_part
        found = work(target, int(first), int(count), Path(place) / "cases", note)
    print(json.dumps(found))
    return 0


def _about(name: str, first: int, engine: str) -> dict[str, Any]:
    return {
        "target": name,
        "engine": engine,
        "first": first,
        "python": platform.python_version(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "code": _code(),
        "cases": 0,
        "taken": 0,
        "refused": 0,
        "causes": {},
        "seconds": 0.0,
        "peak_bytes": 0,
        "slowest_seconds": 0.0,
        "failures": [],
    }


@cache
def _code() -> str:
    """The commit of the code that ran, `-dirty` where files had changed since; empty where git tells none."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _append(out: Path, row: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    bad = f"  {len(row['failures'])} FAILED" if row["failures"] else ""
    print(f"{row['target']:<32}{row['first']:>8} +{row['cases']:<6}{row['seconds']:7.1f} s{bad}", flush=True)


def summary(rows: list[dict[str, Any]]) -> int:
    """What all lines of a file come to, by target. 1 where a case has failed."""
    print(
        f"{'target':<32}{'cases':>9}{'taken':>9}{'refused':>9}{'causes':>8}{'slowest':>10}{'peak':>10}{'failed':>8}"
    )
    totals = Counter[str]()
    for name in dict.fromkeys(row["target"] for row in rows):
        own = [row for row in rows if row["target"] == name]
        counts = {key: sum(row[key] for row in own) for key in ("cases", "taken", "refused")}
        causes = {cause for row in own for cause in row["causes"]}
        failed = sum(len(row["failures"]) for row in own)
        totals.update({**counts, "failed": failed})
        slowest = format_seconds(max(row["slowest_seconds"] for row in own))
        peak = format_bytes(max(row["peak_bytes"] for row in own))
        print(
            f"{name:<32}{counts['cases']:>9,}{counts['taken']:>9,}{counts['refused']:>9,}{len(causes):>8,}"
            f"{slowest:>10}{peak:>10}{failed:>8}"
        )
    print(
        f"{'all':<32}{totals['cases']:>9,}{totals['taken']:>9,}{totals['refused']:>9,}{totals['failed']:>36}"
    )
    return 1 if totals["failed"] else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    sys.exit(main())

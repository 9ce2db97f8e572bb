"""What every benchmark of many cells shares: options, the time limit, a runner, and rows that are kept."""

from __future__ import annotations

import argparse
import faulthandler
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.admission import Gate, Room
from benchmarks.cells import Runner
from benchmarks.forkserver import ForkServer
from benchmarks.rows import Cell, Row, RowLog
from benchmarks.timeleft import LONGEST_SECONDS, TimeLeft
from llmtop.presets.errors import LlmtopError
from llmtop.presets.resolve import Machine
from llmtop.profiler.hardware.machine import detect_machine

RESULTS = Path(__file__).parent / "results"
_HOST_SHARE = 0.85
_DEVICE_SHARE = 0.97
_LATE_SECONDS = 120.0


def add_options(parser: argparse.ArgumentParser, out: Path) -> None:
    """The options of a benchmark that runs cells."""
    parser.add_argument("--out", type=Path, default=out, help=f"rows, one a line (default: {out.name})")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="start nothing after this long, end all a minute later"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time while their upper bounds fit")
    parser.add_argument(
        "--cell-seconds", type=float, default=LONGEST_SECONDS, help="a run that takes longer is ended"
    )
    # What loading the libraries takes is part of the call.
    parser.set_defaults(began=time.monotonic())
    parser.add_argument("--limit", type=int, help="only so many cells")
    parser.add_argument(
        "--part", type=part, default=(0, 1), metavar="K/N", help="every Nth cell from the Kth on"
    )
    parser.add_argument("--supervised", action="store_true", help="by the real supervisor, a start for each")
    parser.add_argument("--cpu", action="store_true", help="on the CPU kind, whatever devices there are")


@contextmanager
def runner(options: argparse.Namespace) -> Iterator[Runner]:
    """Carries out cells as the options say; its folder of runs goes when it ends.

    A call that is still there long after its last run had to be over says where it stands.
    """
    late = 60 * options.minutes + options.cell_seconds + _LATE_SECONDS
    faulthandler.dump_traceback_later(late, repeat=True)
    machine = machine_of(options)
    on_cpu = machine.gpu == "cpu"
    host = None if machine.host_memory_bytes is None else int(_HOST_SHARE * machine.host_memory_bytes)
    device = host if on_cpu else machine.gpu_memory_bytes
    room = Room(device_bytes=None if device is None else int(_DEVICE_SHARE * device), host_bytes=host)
    root = Path(tempfile.mkdtemp(prefix="llmtop-bench-"))
    with ExitStack() as stack:
        stack.callback(faulthandler.cancel_dump_traceback_later)
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        server = None if options.supervised else stack.enter_context(ForkServer(on_cpu=on_cpu))
        if server is not None:
            print(server.ready, flush=True)
        made = Runner(root, machine, Gate(room), server, time_left(options))
        stack.callback(made.close)
        yield made


def run_main(main: Callable[[], None]) -> None:
    """A script's main; what a person can mend is told without a traceback."""
    faulthandler.enable()
    try:
        main()
    except LlmtopError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


def machine_of(options: argparse.Namespace) -> Machine:
    found = detect_machine()
    if options.cpu:
        return Machine(gpu="cpu", gpus=1, host_memory_bytes=found.host_memory_bytes)
    return found


def part(text: str) -> tuple[int, int]:
    """`2/3` as the place of the first cell, from zero, and the step."""
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text} is no part like 1/2")
    return int(number) - 1, int(of)


def of_part(cells: Iterable[Cell], options: argparse.Namespace) -> list[Cell]:
    """The cells that are this call's, as `--part` says."""
    first, of = options.part
    return list(cells)[first::of]


def time_left(options: argparse.Namespace) -> TimeLeft:
    return TimeLeft(options.minutes, longest_seconds=options.cell_seconds, began=options.began)


def run_all(
    cells: Iterable[Cell],
    options: argparse.Namespace,
    row_of: Callable[[Cell, float], Row],
    *,
    facts: Row | None = None,
) -> None:
    """Rows for the cells that have none yet, in order, while there is time.

    `row_of` gets a cell and the seconds that its run may take.
    """
    log = RowLog(options.out)
    todo = [cell for cell in of_part(cells, options) if cell not in log][: options.limit]
    left = time_left(options)

    def work(cell: Cell) -> None:
        seconds = left.seconds_for_a_run()
        if seconds is None:
            return
        row: Row = {**row_of(cell, seconds), **(facts or {})}
        if left.cut(row):
            return
        log.add(row)
        words = " ".join(f"{key}={value}" for key, value in cell.items())
        reason = " ".join(str(row.get("reason") or "").split())
        passed = time.monotonic() - options.began
        print(f"{passed:6.1f} s  {row['status']:<13} {words}  {reason}"[:400], flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        for done in [pool.submit(work, cell) for cell in todo]:
            done.result()
    open_ = sum(cell not in log for cell in todo)
    print(f"{len(todo) - open_} of {len(todo)} cells done" + (", call again for the rest" if open_ else ""))

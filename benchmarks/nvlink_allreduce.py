"""Does llmtop count NVLink's bytes rightly? Collectives of known size, against the totals that it reads.

    python -m benchmarks.nvlink_allreduce [--gpus N] [--mebibytes 256 1024] [--out RESULTS.jsonl]

Ranks on N GPUs all-reduce, all-gather and reduce-scatter. NCCL is told to use its ring, whose bytes are
known, and its plain protocol, for the others send flags along with the data. Before and after each
collective this process, which uses no GPU itself, reads `NvmlReader.link_totals` of every device, once
the totals have stopped changing. Each direction has to agree with the ring's arithmetic within 2 %.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from msgspec import Struct, to_builtins

from benchmarks.zero3_traffic import ring_bytes
from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.hardware.links import LinkTotals
from llmtop.profiler.hardware.nvml import NvmlReader

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]

TOLERANCE = 0.02
STILL_SHARE = 1e-4
"""Of the bytes that a measurement moves: what may pass on links that are idle."""
REPEATS = 20
NCCL = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}
QUIET_SECONDS = 0.5
"""Totals that stood still for this long have taken in everything."""
LIMIT_SECONDS = 10.0
ANSWER_SECONDS = 180.0
_TELL_SECONDS = 10.0
"""So long before it is given up a rank that hangs says where."""
MIB = 1024**2


class Direction(Struct, frozen=True, kw_only=True):
    """One device, one way."""

    device: int
    way: Literal["send", "receive"]
    expected_bytes: int
    measured_bytes: int

    @property
    def ratio(self) -> float:
        return self.measured_bytes / self.expected_bytes


class Result(Struct, frozen=True, kw_only=True):
    """One line of the results."""

    collective: Collective
    gpus: int
    gpu_name: str | None
    tensor_bytes: int
    repeats: int
    seconds: float
    directions: tuple[Direction, ...]
    ratios: tuple[float, ...]
    """Measured over expected, in the order of the directions."""
    worst_error: float
    """Largest distance of a ratio from 1."""
    within_tolerance: bool
    nccl: dict[str, str]
    versions: dict[str, str]
    time: str


def settled(
    read: Callable[[], Sequence[LinkTotals]],
    *,
    still_bytes: int = 0,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Sequence[LinkTotals]:
    """The totals once they have grown by no more than `still_bytes` in QUIET_SECONDS, for idle links are
    not quite silent; raises UsageError when they never do."""
    began = since = clock()
    newest = totals = read()
    while clock() - since < QUIET_SECONDS:
        if clock() - began > LIMIT_SECONDS:
            raise UsageError(
                f"NVLink's counters still move after {LIMIT_SECONDS:.0f} s, at the end by "
                f"{_growth(totals, newest):,} bytes in {clock() - since:.2f} s",
                why="another process uses these GPUs",
                fix="run this on GPUs that nobody else uses",
            )
        pause(QUIET_SECONDS / 10)
        newest = read()
        if _growth(totals, newest) > still_bytes:
            totals, since = newest, clock()
    return newest


def _growth(before: Sequence[LinkTotals], after: Sequence[LinkTotals]) -> int:
    """By how much the total that has grown most has grown."""
    return max(
        abs((new or 0) - (old or 0))
        for older, newer in zip(before, after, strict=True)
        for old, new in (
            (older.nvlink_tx_bytes, newer.nvlink_tx_bytes),
            (older.nvlink_rx_bytes, newer.nvlink_rx_bytes),
        )
    )


def compare(
    expected: int, devices: Sequence[int], before: Sequence[LinkTotals], after: Sequence[LinkTotals]
) -> tuple[Direction, ...]:
    """Both ways of every device."""
    found = []
    for device, old, new in zip(devices, before, after, strict=True):
        sent = _grown(device, old.nvlink_tx_bytes, new.nvlink_tx_bytes)
        received = _grown(device, old.nvlink_rx_bytes, new.nvlink_rx_bytes)
        for way, measured in (("send", sent), ("receive", received)):
            found.append(
                Direction(device=device, way=way, expected_bytes=expected, measured_bytes=measured)  # type: ignore[arg-type]
            )
    return tuple(found)


def _grown(device: int, before: int | None, after: int | None) -> int:
    if before is None or after is None:
        raise UsageError(
            f"the driver tells no NVLink totals of GPU {device}",
            why="the GPU has no NVLink, or only one GPU of its machine is visible here",
            fix="run this where two GPUs with NVLink are visible",
        )
    return after - before


# --- the ranks --------------------------------------------------------------------------------------


def _rank_main(rank: int, ranks: int, store: str, backend: str, pipe: Connection) -> None:
    """One rank: carries out what comes through the pipe until that is closed."""
    faulthandler.dump_traceback_later(ANSWER_SECONDS - _TELL_SECONDS)
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    faulthandler.cancel_dump_traceback_later()
    pipe.send({"torch": str(torch.__version__), "nccl": _nccl_version(torch, backend)})
    while (asked := pipe.recv()) is not None:
        collective, tensor_bytes, repeats = asked
        faulthandler.dump_traceback_later(ANSWER_SECONDS - _TELL_SECONDS)
        whole = torch.ones(tensor_bytes // 4, dtype=torch.float32, device=device)
        part = whole[: whole.numel() // ranks].clone()
        finish()
        began = time.perf_counter()
        for _ in range(repeats):
            if collective == "all_reduce":
                dist.all_reduce(whole)
            elif collective == "all_gather":
                dist.all_gather_into_tensor(whole, part)
            else:
                dist.reduce_scatter_tensor(part, whole)
        finish()
        faulthandler.cancel_dump_traceback_later()
        pipe.send(time.perf_counter() - began)
    dist.destroy_process_group()


def _nccl_version(torch: Any, backend: str) -> str:
    return ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else "none"


class Ranks:
    """Processes that carry out collectives; this one stays without torch and without a GPU."""

    def __init__(self, ranks: int, *, backend: str = "nccl") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="llmtop-allreduce-")
        context = multiprocessing.get_context("spawn")
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(rank, ranks, store, backend, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.versions: dict[str, str] = self._answers()[0]

    def run(self, collective: Collective, tensor_bytes: int, repeats: int) -> float:
        """Seconds that the slowest rank took."""
        for pipe in self._pipes:
            pipe.send((collective, tensor_bytes, repeats))
        return float(max(self._answers()))

    def _answers(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(ANSWER_SECONDS):
                    raise UsageError(f"rank {rank} did not answer in {ANSWER_SECONDS:.0f} s")
                answers.append(pipe.recv())
            except EOFError:
                raise UsageError(f"rank {rank} has died", why="its traceback stands above") from None
        return answers

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kind is None:
                pipe.send(None)
            process.join(30 if kind is None else 0)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self._folder.cleanup()


# --- the measurement --------------------------------------------------------------------------------


def measure(
    reader: NvmlReader, devices: Sequence[int], ranks: Ranks, sizes: Iterable[int], repeats: int
) -> Iterable[Result]:
    """Every collective at every size."""

    def totals() -> list[LinkTotals]:
        return [reader.link_totals(index) for index in devices]

    for tensor_bytes in sizes:
        for collective in get_args(Collective):
            ranks.run(collective, tensor_bytes, 1)  # connections are made at the first use
            expected = repeats * ring_bytes(collective, tensor_bytes, len(devices))
            still = int(STILL_SHARE * expected)
            before = settled(totals, still_bytes=still)
            seconds = ranks.run(collective, tensor_bytes, repeats)
            after = settled(totals, still_bytes=still)
            directions = compare(expected, devices, before, after)
            ratios = tuple(direction.ratio for direction in directions)
            worst = max(abs(ratio - 1) for ratio in ratios)
            yield Result(
                collective=collective,
                gpus=len(devices),
                gpu_name=reader.devices[devices[0]].name,
                tensor_bytes=tensor_bytes,
                repeats=repeats,
                seconds=seconds,
                directions=directions,
                ratios=ratios,
                worst_error=worst,
                within_tolerance=worst <= TOLERANCE,
                nccl=NCCL,
                versions=ranks.versions,
                time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            )


def told(result: Result) -> str:
    """One row for a person."""
    rate = result.directions[0].expected_bytes / result.seconds / 1e9
    sends = [f"{d.ratio:.4f}" for d in result.directions if d.way == "send"]
    receives = [f"{d.ratio:.4f}" for d in result.directions if d.way == "receive"]
    verdict = "ok" if result.within_tolerance else f"off by {100 * result.worst_error:.1f} %"
    return (
        f"{result.collective:<15}{result.tensor_bytes / MIB:>6.0f} MiB  {rate:>6.1f} GB/s  "
        f"send {' '.join(sends)}  receive {' '.join(receives)}  {verdict}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path, help="append the results here as JSON lines")
    args = parser.parse_args(arguments)
    reader = NvmlReader()
    try:
        return _main(reader, args)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    finally:
        reader.close()


def _main(reader: NvmlReader, args: argparse.Namespace) -> int:
    devices = reader.visible_indices()[: args.gpus]
    if args.gpus < 2 or len(devices) < args.gpus:
        raise UsageError(
            f"this needs {max(2, args.gpus)} GPUs, and {len(devices)} are here", why=reader.problem or ""
        )
    for index in devices:
        total = reader.link_totals(index)
        _grown(index, total.nvlink_tx_bytes, total.nvlink_rx_bytes)
    # CUDA's numbers of the devices have to be NVML's.
    os.environ.update(NCCL, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    good = True
    with Ranks(len(devices)) as ranks:
        # Whole numbers of each rank's part.
        step = 4 * len(devices)
        sizes = [size * MIB // step * step for size in args.mebibytes]
        for result in measure(reader, devices, ranks, sizes, args.repeats):
            good &= result.within_tolerance
            print(told(result), flush=True)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(to_builtins(result)) + "\n")
    return ExitCode.DONE if good else ExitCode.BUG


if __name__ == "__main__":
    sys.exit(main())

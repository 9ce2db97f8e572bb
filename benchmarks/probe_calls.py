"""What single calls of the probes cost, back to back and between the phases of a training.

    python -m benchmarks.probe_calls [--seconds 60] [--cpu]

At a phase's border everything runs on caches that the training has swept, and a call may take ten times what
it takes in a loop. So each is timed three ways: `warm`, many in a row; `busy`, one after a forward and a
backward pass of a small model while the device still works on it; `idle`, one after the device is done.
Medians in microseconds, less what the clock takes; one row, with torch's version.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import Row
from benchmarks.session import RESULTS, run_main
from llmtop.profiler.probes.allocator import memory_meter
from llmtop.profiler.probes.phases import StepTimes, phase_timer

Call = Callable[[], object]
Calls = dict[str, Call]
_WARM_CALLS = 100
_WARM_LOOPS = 5
_FEWEST_ROUNDS = 5
_KEPT_EVENTS = 64
"""As many as are alive in a training whose steps are read later."""


def _nothing() -> None:
    """What the clock takes."""


def common_calls(device: torch.device) -> Calls:
    """Of any device: the clocks, and the probes' own."""
    timer, meter = phase_timer(device), memory_meter(device)
    timer.start_step()
    unread: deque[StepTimes] = deque()

    def border() -> None:
        timer.stop("forward")

    def whole_step() -> None:
        timer.start_step()
        for phase in ("data", "forward", "backward", "optimizer"):
            timer.stop(phase)
        unread.append(timer.finish_step())

    def read_step() -> None:
        # Of an earlier round, so the device has got there.
        if unread:
            times = unread.popleft()
            times.step_seconds()
            times.phase_seconds()

    return {
        "nothing": _nothing,
        "perf_counter": time.perf_counter,
        "thread_time": time.thread_time,
        "timer.start_step": timer.start_step,
        "timer.stop": border,
        "timer, a whole step": whole_step,
        "read a step's times": read_step,
        "meter.stop_phase": meter.stop_phase,
    }


def event_calls(device: torch.device) -> Calls:
    """Marks on the stream, by several roads."""
    stream = torch.cuda.current_stream(device)
    kept: list[torch.cuda.Event] = [_event() for _ in range(_KEPT_EVENTS)]
    began, ended, plain = _event(), _event(), _base_event()
    for event in (*kept, began, ended, plain):
        event.record(stream)
    torch.cuda.synchronize(device)
    index = device.index or 0

    def new_and_record() -> None:
        # In place of an older one, which is destroyed, as the reader's are.
        event = _event()
        event.record(stream)
        kept.append(event)

    def new_base_and_record() -> None:
        event = _base_event()
        event.record(stream)
        kept.append(event)

    used = _event()
    used.record(stream)
    return {
        "Event()": _event,
        "_CudaEventBase()": _base_event,
        "Event() and record": new_and_record,
        "_CudaEventBase() and record": new_base_and_record,
        "destroy an event": lambda: kept.pop() and None,
        "Event.record, used before": partial(used.record, stream),
        "_CudaEventBase.record, used before": partial(plain.record, stream),
        "current_stream": torch.cuda.current_stream,
        "_cuda_getCurrentStream": partial(torch._C._cuda_getCurrentStream, index),
        "_cuda_getCurrentRawStream": partial(torch._C._cuda_getCurrentRawStream, index),
        "elapsed_time": partial(began.elapsed_time, ended),
        "_CudaEventBase.elapsed_time": partial(torch._C._CudaEventBase.elapsed_time, began, ended),
        "query": began.query,
        **_ctypes_calls(plain, stream),
    }


def memory_calls(device: torch.device) -> Calls:
    """The allocator's figures, by several roads."""
    index = device.index or 0
    calls: Calls = {
        "memory_stats": partial(torch.cuda.memory_stats, device),
        "memory_stats_as_nested_dict": partial(torch.cuda.memory_stats_as_nested_dict, device),
        "_cuda_memoryStats": partial(torch._C._cuda_memoryStats, index),
        "memory_allocated": partial(torch.cuda.memory_allocated, device),
        "max_memory_allocated": partial(torch.cuda.max_memory_allocated, device),
        "reset_peak_memory_stats": partial(torch.cuda.reset_peak_memory_stats, device),
        "_cuda_resetPeakMemoryStats": partial(torch._C._cuda_resetPeakMemoryStats, index),
        "mem_get_info": partial(torch.cuda.mem_get_info, device),
    }
    # Newer than the oldest torch that we take.
    for name in ("_accelerator_getDeviceStats", "_accelerator_resetPeakStats"):
        call = getattr(torch._C, name, None)
        if call is not None:
            calls[name] = partial(call, index)
    return calls


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _base_event() -> Any:
    """Without the Python class around it."""
    return torch._C._CudaEventBase(enable_timing=True)


def _ctypes_calls(event: Any, stream: torch.cuda.Stream) -> Calls:
    """`cudaEventRecord` of the runtime that torch has loaded; nothing where it is linked into torch."""
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    runtime = next((path for path in sorted(loaded) if "libcudart.so" in path), None)
    if runtime is None:
        return {}
    handle, on = ctypes.c_void_p(event.cuda_event), ctypes.c_void_p(stream.cuda_stream)
    return {
        "ctypes.CDLL cudaEventRecord": partial(ctypes.CDLL(runtime).cudaEventRecord, handle, on),
        "ctypes.PyDLL cudaEventRecord": partial(ctypes.PyDLL(runtime).cudaEventRecord, handle, on),
    }


class Sweep:
    """A forward and a backward pass of a small model: what fills the caches between two borders."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        width, layers, self._device = (1024, 12, device) if on_cuda else (64, 2, device)
        layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        self._model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device)
        self._batch = torch.randn(4, 512 if on_cuda else 16, width, device=device)

    def __call__(self) -> None:
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            loss = self._model(self._batch).float().square().mean()
        loss.backward()
        self._model.zero_grad(set_to_none=True)


def warm_seconds(call: Call) -> float:
    """Of one of many in a row."""
    began = time.perf_counter()
    for _ in range(_WARM_CALLS):
        call()
    return (time.perf_counter() - began) / _WARM_CALLS


def once_seconds(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(calls: Calls, device: torch.device, seconds: float) -> dict[str, dict[str, float]]:
    """Microseconds by call and way."""
    sweep, order = Sweep(device), random.Random(0)
    wait: Call = partial(torch.cuda.synchronize, device) if device.type == "cuda" else _nothing
    for _ in range(3):
        sweep()
    wait()
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in calls}
    ways = ("busy", "idle") if device.type == "cuda" else ("idle",)
    deadline, rounds = time.monotonic() + seconds, 0
    while rounds < _FEWEST_ROUNDS or time.monotonic() < deadline:
        rounds += 1
        names = list(calls)
        order.shuffle(names)
        for name in names:
            for way in ways:
                sweep()
                if way == "idle":
                    wait()
                found[name][way].append(once_seconds(calls[name]))
                wait()
    for _ in range(_WARM_LOOPS):
        for name, call in calls.items():
            found[name]["warm"].append(warm_seconds(call))
            wait()
    medians = {
        name: {way: statistics.median(values) for way, values in by.items()} for name, by in found.items()
    }
    clock = medians["nothing"]
    return {
        name: {way: round(1e6 * (value - clock[way]), 2) for way, value in by.items()}
        for name, by in medians.items()
        if name != "nothing"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cpu", action="store_true", help="the CPU's calls, whatever devices there are")
    parser.add_argument("--out", type=Path, default=RESULTS / "probe_calls.jsonl")
    options = parser.parse_args()
    on_cuda = torch.cuda.is_available() and not options.cpu
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    calls = common_calls(device)
    if on_cuda:
        calls |= event_calls(device) | memory_calls(device)
    microseconds = measure(calls, device, options.seconds)
    name = torch.cuda.get_device_name(device) if on_cuda else "cpu"
    row: Row = {"device": name, "torch": torch.__version__, "microseconds": microseconds}
    for call, by in microseconds.items():
        print(f"{call:<38} " + "  ".join(f"{way} {value:8.2f}" for way, value in by.items()), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as log:
        log.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    run_main(main)

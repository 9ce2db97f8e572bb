"""What each stage of start-up is doing while it lasts, and what is said of one that lasts too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llmtop.presets.spec import RunSpec
from llmtop.profiler.findings.finding import Finding, Rule, Seen
from llmtop.profiler.fold.rankstate import RankState, StageTime
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.opwords import OP_WORDS
from llmtop.profiler.units import format_bytes, format_percent, format_rate, format_seconds

USUAL_SECONDS: dict[str, float] = {
    "import": 30.0,
    "process_group": 10.0,
    "data": 30.0,
    "op_build": 10.0,
    "model": 30.0,
    "weights": 60.0,
    "engine": 60.0,
    "partition": 60.0,
    "first_step": 60.0,
}
"""A stage that takes longer is worth a line; most take a tenth of it."""
DOING: dict[str, str] = {
    "import": "importing",
    "process_group": "joining the ranks",
    "data": "preparing the data",
    "op_build": "building ops",
    "model": "building the model",
    "weights": "loading weights",
    "engine": "building the engine",
    "partition": "handing the model to DeepSpeed",
    "first_step": "in its first step",
}
_TOGETHER = frozenset({"process_group", "engine", "partition", "first_step"})
"""Stages in which each rank waits for all others; so do the model and its weights at ZeRO-3."""
_OP_TAKES: dict[str, str] = {
    "cpu_adam": "over a minute",
    "async_io": "some minutes",
    "fused_adam": "a minute or two",
}


def running_stage(rank: RankState) -> StageTime | None:
    """The stage that a rank has begun and not finished."""
    return next((time for time in reversed(rank.stages) if time.seconds is None), None)


def stage_hint(state: RunState, spec: RunSpec, prediction: Prediction | None, stage: str) -> str:
    """What this stage does now, in words; empty where there is nothing to add to its name."""
    late = _late_ranks(state, spec, stage)
    if late:
        return late
    return _HINTS.get(stage, _nothing)(state, spec, prediction)


def _late_ranks(state: RunState, spec: RunSpec, stage: str) -> str:
    """Of a stage that takes all ranks: who is not there yet, and what keeps it."""
    if stage not in _TOGETHER and not (stage in ("model", "weights") and spec.options.zero == 3):
        return ""
    behind: dict[str, list[int]] = {}
    for number in state.ranks_here:
        rank = state.ranks.get(number)
        if rank is not None and any(time.stage == stage for time in rank.stages):
            continue
        now = running_stage(rank) if rank is not None else None
        doing = f"still {DOING.get(now.stage, now.stage)}" if now else "not this far yet"
        behind.setdefault(doing, []).append(number)
    if not behind or len(state.ranks) < 2:
        return ""
    doing, numbers = max(behind.items(), key=lambda item: len(item[1]))
    shown = ", ".join(map(str, numbers[:4])) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
    verb = "is" if len(numbers) == 1 else "are"
    return f"waiting for rank {shown}, which {verb} {doing}"


def _nothing(_state: RunState, _spec: RunSpec, _prediction: Prediction | None) -> str:
    return ""


def _import(_state: RunState, _spec: RunSpec, _prediction: Prediction | None) -> str:
    return "libraries are read from the disk; the first time, or over a network, this takes minutes"


def _process_group(_state: RunState, spec: RunSpec, _prediction: Prediction | None) -> str:
    if spec.on_cpu:
        return "all ranks are here; gloo connects them"
    return (
        "all ranks are here; NCCL connects them. NCCL_DEBUG=INFO makes it tell in the ranks' logs where it is"
    )


def _data(_state: RunState, _spec: RunSpec, _prediction: Prediction | None) -> str:
    return "the first rank tokenizes the data for all; a relaunch of this run finds it done"


def _op_build(state: RunState, _spec: RunSpec, _prediction: Prediction | None) -> str:
    name = state.compiling
    if name is None:
        return "ops are loaded, or another process builds one of them now and keeps its lock"
    words, takes = OP_WORDS.get(name, name), _OP_TAKES.get(name, "a minute or more")
    return f"building {words}: {takes} the first time, then it is kept for this environment"


def _weights(state: RunState, _spec: RunSpec, _prediction: Prediction | None) -> str:
    """By the rank that has most left to read."""
    told = [(rank, rank.weights_read) for rank in state.ranks.values() if rank.weights_read is not None]
    unfinished = [pair for pair in told if pair[1].read_bytes < pair[1].total_bytes]
    if not unfinished:
        return "" if told else "nothing has been read yet"
    rank, read = min(unfinished, key=lambda pair: pair[1].read_bytes / pair[1].total_bytes)
    percent = format_percent(100 * read.read_bytes / read.total_bytes, digits=0)
    words = f"{percent} of {format_bytes(read.total_bytes)} read"
    began = next((time.began for time in reversed(rank.stages) if time.stage == "weights"), None)
    if began is not None and read.t > began:
        words += f" at {format_rate(read.read_bytes / (read.t - began))}"
    return words + (f" by rank {rank.rank}" if len(told) > 1 else "")


def _partition(_state: RunState, _spec: RunSpec, prediction: Prediction | None) -> str:
    pinned = prediction.pinned_bytes if prediction is not None else 0
    if pinned:
        return f"flat buffers are made, and {format_bytes(pinned)} of host memory locked, which is slow"
    return "flat buffers of parameters, gradients and optimizer are made"


def _first_step(_state: RunState, spec: RunSpec, _prediction: Prediction | None) -> str:
    if spec.on_cpu:
        return "memory is taken for the first time"
    triton = "Triton compiles Liger's kernels and keeps them; " if spec.options.liger else ""
    return f"{triton}kernels are loaded and memory is taken for the first time"


_HINTS: dict[str, Callable[[RunState, RunSpec, Prediction | None], str]] = {
    "import": _import,
    "process_group": _process_group,
    "data": _data,
    "op_build": _op_build,
    "weights": _weights,
    "engine": _partition,
    "partition": _partition,
    "first_step": _first_step,
}


def slow_stage(seen: Seen) -> Iterator[Finding]:
    """The stage that has been going on for longer than is usual."""
    state = seen.state
    if state.now is None or state.status in ENDED:
        return
    going_on = [time for rank in state.ranks.values() if (time := running_stage(rank)) is not None]
    if not going_on:
        return
    longest = min(going_on, key=lambda time: time.began)
    seconds = state.now - longest.began
    # A compiler at work has a finding of its own.
    if seconds < USUAL_SECONDS.get(longest.stage, 60.0) or state.compiling is not None:
        return
    hint = stage_hint(state, seen.spec, seen.prediction, longest.stage)
    yield Finding(
        key="startup_slow",
        severity="info",
        title=f"long in {longest.stage.replace('_', ' ')}: {format_seconds(seconds)}",
        evidence=hint or f"the ranks are {DOING.get(longest.stage, longest.stage)}",
        change="wait, or read the ranks' logs (llmtop logs RUN)",
    )


def not_streamed(seen: Seen) -> Iterator[Finding]:
    """Transformers' loader may hold the weights twice in host memory; packed ones have no other."""
    loaded = [rank.weights_loaded for rank in seen.state.ranks.values() if rank.weights_loaded is not None]
    by_transformers = [each for each in loaded if each.way == "transformers"]
    if by_transformers and seen.spec.options.quantization == "none":
        yield Finding(
            key="weights_not_streamed",
            severity="info",
            title="weights were not streamed",
            evidence=f"transformers' own loader read them, because {by_transformers[0].reason}",
            change="load the model once, save it with the installed transformers, and start from that folder",
        )


STARTUP_RULES: tuple[Rule, ...] = (slow_stage, not_streamed)

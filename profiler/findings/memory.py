"""Findings about memory: the prediction's error, room that is left, room that runs out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmtop.profiler.findings.finding import Finding, Rule, Seen, first_line, set_command, words
from llmtop.profiler.fold.ending import ending
from llmtop.profiler.fold.rankstate import RankState
from llmtop.profiler.fold.runstate import ENDED
from llmtop.profiler.memory.allocator import DRIVER_RESERVE_BYTES
from llmtop.profiler.memory.result import Component
from llmtop.profiler.units import format_bytes, format_percent

if TYPE_CHECKING:
    from llmtop.profiler.oom.diagnosis import OutOfMemory

PREDICTION_TOLERANCE_PERCENT = 10.0
UNUSED_SHARE = 0.4
FRAGMENTATION_SHARE = 0.15
FRAGMENTATION_FLOOR_BYTES = 1 << 30
HOST_WARNING_SHARE, HOST_CRITICAL_SHARE = 0.90, 0.96
OWN_SHARE = 0.5
"""Of the memory in use; a run that holds less is not the one to make smaller."""
OTHERS_FLOOR_BYTES = DRIVER_RESERVE_BYTES + (1 << 29)


def prediction_off(seen: Seen) -> Iterator[Finding]:
    found = seen.breakdown
    error, actual = found.error_percent, found.actual_peak_bytes
    if error is None or actual is None or abs(error) <= PREDICTION_TOLERANCE_PERCENT:
        return
    if found.reclaimed or found.peak_is_seen:
        return  # the actual figure may be too small
    under = error < 0
    yield Finding(
        key="prediction_off",
        severity="warning" if under else "info",
        title=f"{'more' if under else 'less'} memory used than predicted",
        evidence=(
            f"predicted {format_bytes(found.predicted_peak_bytes)}, actual {format_bytes(actual)} on rank "
            f"{found.peak_rank} in {found.peak_phase} ({format_percent(error, signed=True)})"
            f"{_largest_difference(seen)}"
        ),
        change=(
            f"plan with the upper bound ({format_bytes(seen.prediction.peak_allocated_upper_bytes)}) or with "
            "this run's actual peak"
            if under
            else "there is more room than the plan says; plan with this run's actual peak"
        ),
    )


def _largest_difference(seen: Seen) -> str:
    differences = [
        (abs((row.predicted_bytes or 0) - row.actual_bytes), row)
        for row in seen.breakdown.rows
        if row.in_peak and row.actual_bytes is not None
    ]
    if not differences:
        return ""
    row = max(differences, key=lambda pair: pair[0])[1]
    return (
        f"; most of it in {words(row.component)}: predicted {format_bytes(row.predicted_bytes or 0)}, "
        f"actual {format_bytes(row.actual_bytes)}"
    )


def room_unused(seen: Seen) -> Iterator[Finding]:
    capacity, used = _device_capacity(seen), seen.breakdown.actual_device_bytes
    if capacity is None or used is None or seen.state.steps_finished < 2:
        return
    if used > (1 - UNUSED_SHARE) * capacity:
        return
    change, words = _use_of_room(seen)
    yield Finding(
        key="memory_unused",
        severity="info",
        title=f"{format_bytes(capacity - used)} of each GPU is never used",
        evidence=(
            f"largest use {format_bytes(used)} of {format_bytes(capacity)} "
            f"in {seen.state.steps_finished} steps"
        ),
        change=words,
        command=set_command(seen.state.called, change),
    )


def _use_of_room(seen: Seen) -> tuple[dict[str, object], str]:
    """What the prediction says fits and pays most; else the nearest step towards it."""
    for suggestion in seen.prediction.suggestions if seen.prediction.fits else ():
        if suggestion.fits:
            peak = format_bytes(suggestion.peak_allocated_bytes)
            return suggestion.change, f"{suggestion.text}: predicted peak {peak}"
    options = seen.spec.options
    if options.offload_param != "none" or options.offload_optimizer != "none":
        words = "bring the offloaded state back: --offload-param none --offload-optimizer none"
        return {"offload_param": "none", "offload_optimizer": "none"}, words
    if options.zero == 3:
        return {"zero": 2}, "ZeRO-3 gathers weights that may fit whole: try --zero 2"
    if options.gradient_checkpointing:
        every = " --checkpointing-every 1" if options.checkpointing_every > 1 else ""
        words = f"stop recomputing: --no-gradient-checkpointing{every}"
        return {"gradient_checkpointing": False, "checkpointing_every": 1}, words
    twice = 2 * options.micro_batch
    return {"micro_batch": twice}, f"raise --micro-batch from {options.micro_batch} to {twice}"


def _device_capacity(seen: Seen) -> int | None:
    if seen.spec.on_cpu:
        return None
    hardware = seen.state.hardware
    totals = [d.memory_total_bytes for d in hardware.devices if d.memory_total_bytes] if hardware else []
    return min(totals) if totals else seen.spec.gpu.memory_bytes


def host_memory_short(seen: Seen) -> Iterator[Finding]:
    """The tighter of the machine's memory and the cgroup's limit: near it the kernel kills ranks.

    While a run goes on its newest sample counts, so that the finding goes when the memory is free again.
    """
    state = seen.state
    host = state.hardware.host if state.hardware else None
    if host is None:
        return
    ended = state.status in ENDED
    machine, cgroup = host.memory_in_use_bytes, host.cgroup_used_bytes
    if ended:
        machine, cgroup = state.peak_host_bytes, state.peak_cgroup_bytes
    limits = (
        ("cgroup", cgroup, host.cgroup_limit_bytes),
        ("machine", machine, host.memory_total_bytes),
    )
    shares = [(used / limit, name, used, limit) for name, used, limit in limits if used is not None and limit]
    if not shares or max(shares)[0] < HOST_WARNING_SHARE:
        return
    share, name, used, limit = max(shares)
    own = _own_host_bytes(seen, ended)
    others = own is not None and own < OWN_SHARE * used
    swap = state.peak_swap_bytes if ended else host.swap_used_bytes
    evidence = f"{format_bytes(used)} of {format_bytes(limit)} ({format_percent(100 * share)})"
    evidence += f", {format_bytes(own)} of it this run's" if own is not None else ""
    evidence += f", {format_bytes(swap)} of swap in use" if swap else ""
    critical = share >= HOST_CRITICAL_SHARE and state.status not in ("completed", "stopped")
    verb = "filled" if ended else "fill"
    yield Finding(
        key="host_memory_short",
        severity="critical" if critical else "warning",
        title=f"other processes {verb} memory"
        if others
        else f"the {name}'s memory {'was' if ended else 'is'} nearly full",
        evidence=evidence,
        change=f"end other programs{_where(name)}" if others else host_relief(seen),
    )


def _where(limit: str) -> str:
    return " on this machine" if limit == "machine" else " in the same container or job"


def _own_host_bytes(seen: Seen, ended: bool) -> int | None:
    """What the ranks hold of the host's memory; None when nobody has looked."""
    state = seen.state
    if ended:
        # The ops are built before the rest is there: at most all of both at once.
        peaks = state.peak_pss_bytes or state.peak_rss_bytes
        known = [*peaks.values(), *state.peak_compiler_bytes.values()]
    else:
        processes = state.hardware.processes if state.hardware else ()
        held = (p.rss_bytes if p.pss_bytes is None else p.pss_bytes for p in processes)
        known = [size for size in held if size is not None]
    # Pages that a driver pinned are not in the resident set of a process everywhere.
    pinned = 0 if seen.spec.on_cpu else seen.prediction.pinned_bytes
    return sum(known) + pinned if known else None


def pages_reclaimed(seen: Seen) -> Iterator[Finding]:
    found = seen.breakdown
    if not found.reclaimed or found.unexplained_bytes is None:
        return
    swap = seen.state.peak_swap_bytes
    yield Finding(
        key="pages_reclaimed",
        severity="warning",
        title="actual memory is not reliable",
        evidence=f"what rank {found.peak_rank} is known to hold is {format_bytes(-found.unexplained_bytes)} "
        f"larger than the {format_bytes(found.actual_peak_bytes)} that its process had resident: "
        "the kernel swapped or reclaimed pages"
        + (f"; up to {format_bytes(swap)} of swap in use" if swap else ""),
        change="free memory on this machine and run again before comparing with the prediction",
    )


def host_relief(seen: Seen) -> str:
    """What takes less of the host's memory."""
    options = seen.spec.options
    if options.offload_param == "cpu":
        return "keep the parameters on the GPU (--offload-param none) or on NVMe (--offload-param nvme)"
    if options.offload_optimizer == "cpu":
        return "move the optimizer to NVMe (--offload-optimizer nvme --nvme-path DIR) or use more GPUs"
    if seen.spec.on_cpu and options.gpus > 1:
        return f"run fewer processes (--gpus {options.gpus - 1}) or lower --micro-batch"
    return "raise the limit of the container or the job, or end other programs on this machine"


def fragmented(seen: Seen) -> Iterator[Finding]:
    peak, reserved = seen.breakdown.actual_peak_bytes, seen.breakdown.reserved_bytes
    if peak is None or reserved is None:
        return
    lost = reserved - peak
    if lost < FRAGMENTATION_FLOOR_BYTES or lost <= FRAGMENTATION_SHARE * peak:
        return
    yield Finding(
        key="fragmentation",
        severity="warning",
        title=f"the allocator holds {format_bytes(lost)} idle",
        evidence=(
            f"reserved {format_bytes(reserved)}, allocated at most {format_bytes(peak)} "
            f"({format_percent(100 * lost / peak)} more) on rank {seen.breakdown.peak_rank}"
        ),
        change="set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment of the run",
    )


def others_on_the_device(seen: Seen) -> Iterator[Finding]:
    for rank in seen.state.ranks.values():
        before = rank.baseline.device_used_before_bytes if rank.baseline else None
        if before is not None and before > OTHERS_FLOOR_BYTES:
            yield Finding(
                key="other_processes",
                severity="warning",
                title=f"others use the GPU of rank {rank.rank}",
                evidence=f"{format_bytes(before)} were in use before this run touched it",
                change="end that process (see nvidia-smi) or choose other GPUs with CUDA_VISIBLE_DEVICES",
            )
            return


def out_of_memory(seen: Seen) -> Iterator[Finding]:
    state = seen.state
    if state.status != "out_of_memory" and all(rank.failed is None for rank in state.ranks.values()):
        return
    # For a run that failed so: the first screen of every other one would wait for it.
    from llmtop.profiler.oom.diagnosis import diagnose
    from llmtop.profiler.oom.words import evidence, moment_words

    found = diagnose(state, seen.spec, seen.prediction)
    if found is None and state.status != "out_of_memory":
        return
    parts = [state.ended.reason] if state.ended is not None else []
    command = ""
    if found is not None and found.shortage is not None:
        parts = [moment_words(found), *(text for _, text in evidence(found))]
    elif found is not None:
        parts = [_how_it_ran_out(state.ranks[found.rank])]
    parts.append(_what_was_large(seen))
    if found is not None and state.status == "out_of_memory":
        command = next((fix.command for fix in found.fixes if fix.command), "")
    yield Finding(
        key="out_of_memory",
        severity="critical",
        title="the run ran out of memory",
        evidence="; ".join(part for part in parts if part),
        change=_cheapest_relief(seen, found),
        command=command,
    )


def healed(seen: Seen) -> Iterator[Finding]:
    """Memory ran out, and the run went on with a smaller micro-batch by itself."""
    records = [record for record in seen.state.changes.records if record.asked and record.asked.why]
    if not records:
        return
    newest = records[-1].asked
    assert newest is not None
    options = seen.spec.options
    yield Finding(
        key="healed",
        severity="warning",
        title=f"memory ran out, and the run went on with micro-batch {options.micro_batch}",
        evidence=newest.why + (f"; {len(records)} times in all" if len(records) > 1 else ""),
        change=f"start the next one with --micro-batch {options.micro_batch} --grad-accum"
        f" {options.grad_accum}, or see what llmtop plan suggests",
    )


def _how_it_ran_out(rank: RankState) -> str:
    told = rank.failed
    assert told is not None
    where = f" in {told.stage}" if told.stage else ""
    when = f" of step {told.step}" if told.step is not None else ""
    return f"rank {rank.rank}{where}{when}: {first_line(told.message) or told.error_type}"


def _what_was_large(seen: Seen) -> str:
    """The largest component of the training, measured where a step was, else predicted."""
    beside = (Component.UNEXPLAINED, Component.RUNTIME, Component.OTHER_PROCESSES)
    named = [row for row in seen.breakdown.rows if row.component not in beside]
    rows = [row for row in named if row.actual_bytes]
    predicted = [row for row in named if row.predicted_bytes]
    if rows:
        row = max(rows, key=lambda row: row.actual_bytes or 0)
        return (
            f"last measured peak {format_bytes(seen.breakdown.actual_peak_bytes)}, "
            f"most of it {words(row.component)} "
            f"({format_bytes(row.actual_bytes)}, predicted {format_bytes(row.predicted_bytes)})"
        )
    if predicted:
        row = max(predicted, key=lambda row: row.predicted_bytes or 0)
        return (
            f"no step was measured; predicted peak {format_bytes(seen.prediction.peak_allocated_bytes)}, "
            f"most of it {words(row.component)} ({format_bytes(row.predicted_bytes)})"
        )
    return ""


def _cheapest_relief(seen: Seen, found: OutOfMemory | None) -> str:
    from llmtop.profiler.oom.words import fix_words, nothing_fits

    if seen.state.ended is not None and (told := ending(seen.state).fix):
        return told
    if found is not None and found.on_host:
        return host_relief(seen)
    if found is not None and found.fixes:
        return fix_words(found.fixes[0])
    return nothing_fits(seen.prediction, found.room if found is not None else None)


MEMORY_RULES: tuple[Rule, ...] = (
    out_of_memory,
    healed,
    host_memory_short,
    pages_reclaimed,
    prediction_off,
    others_on_the_device,
    fragmented,
    room_unused,
)

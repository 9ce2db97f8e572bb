"""Findings that name what a step waits for: the host, the links between GPUs, or what was offloaded.

Each speaks only after warm-up, and each names figures of the record. Where one explains the time already
(data, a straggler), the others that it would look like are silent.
"""

from __future__ import annotations

from collections.abc import Iterator

from llmtop.profiler.findings.finding import Finding, Rule, Seen, set_command
from llmtop.profiler.findings.pace import mean_of, mean_phases, steady_devices, step_seconds
from llmtop.profiler.findings.speed import INPUT_SHARE, straggler
from llmtop.profiler.memory.halving import doubled
from llmtop.profiler.record.deviceevents import DeviceSample
from llmtop.profiler.record.stepevents import BEFORE_FORWARD
from llmtop.profiler.units import format_percent, format_rate, format_seconds

IDLE_BUSY_PERCENT = 70.0
"""Of the time in which any kernel ran. A step that the device limits is above 90; gaps of launches and of
the loader's hand-over take a few percent."""
IDLE_SM_PERCENT = 45.0
"""Of the SMs that had work, where the device measures that: kernels may follow one another and still be too
small to fill it. Large matrix products reach 80 and more."""
KERNELS_SHARE = 0.6
"""Of a step, that all its kernels together take: below this the device stood still for the rest."""
COMMUNICATION_SHARE, COMMUNICATION_WARNING_SHARE = 0.25, 0.40
"""Of the time of all kernels. Collectives overlap with arithmetic, so a fifth may cost nothing."""
OFFLOAD_SHARE = 0.35
"""Of a step, in the optimizer, where its states are offloaded: without offload it is a few percent."""
PCIE_SHARE = 0.5
"""Of what the link can carry, as the mean of a whole step in which it also rests."""
SLOW_ADAM = 2.0
"""Times what the host's memory would take for the optimizer's bytes."""


def host_bound(seen: Seen) -> Iterator[Finding]:
    """The devices wait for the host to launch work, and nothing else explains it."""
    if seen.spec.on_cpu or _explained(seen):
        return
    usual, devices = step_seconds(seen), steady_devices(seen.state)
    if usual is None:
        return
    told = [*_idle_devices(devices), *_idle_kernels(seen, usual)]
    if not told or _waits_for_links(devices):
        return
    processes = seen.state.hardware.processes if seen.state.hardware else ()
    cores = [p.cpu_percent for p in processes if p.cpu_percent is not None]
    if cores:
        told.append(f"the ranks' processes use {format_percent(max(cores), digits=0)} of a core at most")
    change, words = _fewer_launches(seen)
    yield Finding(
        key="host_bound",
        severity="warning",
        title="GPUs wait for the host",
        evidence="; ".join(told),
        change=words,
        command=set_command(seen.state.called, change),
    )


def _explained(seen: Seen) -> bool:
    """Whether another rule has named why devices stand still."""
    options = seen.spec.options
    if options.offload_optimizer != "none" or options.offload_param != "none":
        return True
    times = mean_phases(seen.state.first)
    outside = sum(times.get(name, 0.0) for name in BEFORE_FORWARD)
    return outside >= INPUT_SHARE * (sum(times.values()) or 1.0) or any(straggler(seen))


def _idle_devices(devices: list[DeviceSample]) -> list[str]:
    active, busy = mean_of(devices, "sm_active_percent"), mean_of(devices, "utilization_percent")
    if active is not None:
        words = f"{format_percent(active, digits=0)} of the SMs had work on average"
        return [words] if active < IDLE_SM_PERCENT else []
    if busy is not None and busy < IDLE_BUSY_PERCENT:
        return [f"a kernel ran in {format_percent(busy, digits=0)} of the time"]
    return []


def _idle_kernels(seen: Seen, usual: float) -> list[str]:
    """From the step whose kernels were recorded: it tells of one micro-batch."""
    rank = seen.state.first
    kernels = rank.kernels if rank is not None else None
    if kernels is None or not kernels.total_seconds or rank is None or rank.last_step is None:
        return []
    took = kernels.total_seconds * rank.last_step.grad_accum
    if took >= KERNELS_SHARE * usual:
        return []
    return [f"all kernels of a step take {format_seconds(took)} of its {format_seconds(usual)}"]


def _waits_for_links(devices: list[DeviceSample]) -> bool:
    """Little work and full links: what is waited for is not the host."""
    return any(_pcie_share(device) > PCIE_SHARE for device in devices[-16:])


def _fewer_launches(seen: Seen) -> tuple[dict[str, object], str]:
    options = seen.spec.options
    if options.zero == 3 and not seen.spec.on_cpu and seen.spec.world_size > 1:
        return {"zero": 2}, "ZeRO-3's hooks cost the host time for each block: --zero 2 if it fits"
    larger = doubled(options.micro_batch, options.grad_accum)
    if larger is not None:
        change: dict[str, object] = {"micro_batch": larger[0], "grad_accum": larger[1]}
        return change, "fewer, larger micro-batches launch less: raise --micro-batch, lower --grad-accum"
    if not options.liger:
        return {"liger": True}, "fused kernels launch less: --liger; or raise --micro-batch"
    return {"micro_batch": 2 * options.micro_batch}, "more work for each launch: raise --micro-batch"


def communication_bound(seen: Seen) -> Iterator[Finding]:
    """By the recorded kernels; collectives wait for slow ranks too, which have a finding of their own."""
    rank = seen.state.first
    kernels = rank.kernels if rank is not None else None
    if kernels is None or not kernels.total_seconds or seen.spec.world_size < 2 or seen.spec.on_cpu:
        return
    if step_seconds(seen) is None or any(straggler(seen)):
        return
    spent = [kernel for kernel in kernels.top if kernel.name.lower().startswith("nccl")]
    seconds = sum(kernel.seconds for kernel in spent)
    share = seconds / kernels.total_seconds
    if share < COMMUNICATION_SHARE:
        return
    told = f"collectives take {format_seconds(seconds)} of {format_seconds(kernels.total_seconds)} of kernels"
    told += f" in a micro-batch ({format_percent(100 * share, digits=0)})"
    if kernels.communication:
        told += f": {', '.join(kernels.communication)}"
    change, words = _less_traffic(seen)
    yield Finding(
        key="communication_bound",
        severity="warning" if share >= COMMUNICATION_WARNING_SHARE else "info",
        title="the step waits for the links",
        evidence=told + _carried(seen),
        change=words,
        command=set_command(seen.state.called, change),
    )


def _carried(seen: Seen) -> str:
    """What the links carried, of what they can."""
    devices = steady_devices(seen.state)
    for name, rate, can in (
        ("NVLink", mean_of(devices, "nvlink_tx_bytes_per_second"), seen.spec.gpu.nvlink_bytes_per_second),
        ("PCIe", mean_of(devices, "pcie_tx_bytes_per_second"), seen.spec.gpu.pcie_bytes_per_second),
    ):
        if rate is not None:
            of = f" of {format_rate(can)}" if can else ""
            return f"; a GPU sends {format_rate(rate)}{of} by {name} on average"
    return ""


def _less_traffic(seen: Seen) -> tuple[dict[str, object], str]:
    options = seen.spec.options
    if options.zero == 3:
        words = "ZeRO-3 gathers every weight twice a micro-batch: --zero 2 if it fits, or raise --micro-batch"
        return {"zero": 2}, words
    twice = 2 * options.grad_accum
    words = f"exchange gradients less often: --grad-accum {twice}, or a larger --micro-batch"
    return {"grad_accum": twice}, words


def offload_bound(seen: Seen) -> Iterator[Finding]:
    """Which of the roads of offload holds the step: PCIe, or Adam on the CPU (NVMe has a rule of its own)."""
    options = seen.spec.options
    usual = step_seconds(seen)
    if seen.spec.on_cpu or usual is None:
        return
    if options.offload_optimizer == "none" and options.offload_param == "none":
        return
    from llmtop.profiler.cost.nvme import uses_nvme  # which loads much of the prediction

    devices = steady_devices(seen.state)
    pcie = max((_pcie_share(device) for device in _means(devices)), default=0.0)
    change, words = _less_offload(seen)
    command = set_command(seen.state.called, change)
    if pcie >= PCIE_SHARE:
        sent = mean_of(devices, "pcie_tx_bytes_per_second")
        received = mean_of(devices, "pcie_rx_bytes_per_second")
        yield Finding(
            key="offload_bound_pcie",
            severity="warning",
            title="the step waits for PCIe",
            evidence=f"a GPU sends {format_rate(sent)} and receives {format_rate(received)} on average, "
            f"{format_percent(100 * pcie, digits=0)} of what its link carries at most",
            change=words,
            command=command,
        )
        return
    times = mean_phases(seen.state.first)
    optimizer = times.get("optimizer", 0.0)
    if options.offload_optimizer == "none" or uses_nvme(seen.spec) or optimizer < OFFLOAD_SHARE * usual:
        return
    yield Finding(
        key="offload_bound_cpu_adam",
        severity="warning",
        title="the step waits for Adam on the CPU",
        evidence=f"the optimizer takes {format_seconds(optimizer)} of {format_seconds(usual)} a step "
        f"({format_percent(100 * optimizer / usual, digits=0)}){_possible(seen, optimizer)}",
        change=words,
        command=command,
    )


def _possible(seen: Seen, optimizer: float) -> str:
    """The measured optimizer beside what the host's memory would take for its bytes."""
    from llmtop.profiler.cost.steptime import CPU_ADAM_BYTES_PER_SECOND, step_time  # seldom needed

    predicted = step_time(seen.spec)
    if predicted is None or not predicted.offload:
        return ""
    words = f"; at {format_rate(CPU_ADAM_BYTES_PER_SECOND)} of host memory it could be "
    words += format_seconds(predicted.offload)
    if optimizer >= SLOW_ADAM * predicted.offload:
        words += ": too few threads or cores far from the memory (--set threads_per_rank=N)"
    return words


def _less_offload(seen: Seen) -> tuple[dict[str, object], str]:
    options = seen.spec.options
    for suggestion in seen.prediction.suggestions if seen.prediction.fits else ():
        back = "offload_optimizer" in suggestion.change or "offload_param" in suggestion.change
        if back and suggestion.fits:
            return suggestion.change, f"it fits without offload: {suggestion.text}"
    twice = 2 * options.grad_accum
    return {"grad_accum": twice}, f"more tokens for each optimizer step: --grad-accum {twice}; or more GPUs"


def _means(devices: list[DeviceSample]) -> list[DeviceSample]:
    """One reading a device: the mean of its links over the samples."""
    found = []
    for index in sorted({device.index for device in devices}):
        own = [device for device in devices if device.index == index]
        found.append(
            DeviceSample(
                index=index,
                pcie_tx_bytes_per_second=mean_of(own, "pcie_tx_bytes_per_second"),
                pcie_rx_bytes_per_second=mean_of(own, "pcie_rx_bytes_per_second"),
                pcie_generation=own[-1].pcie_generation,
                pcie_width=own[-1].pcie_width,
            )
        )
    return found


_LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Each way after the line code, by generation (PCI-SIG: 8b/10b, 128b/130b, FLITs)."""


def _pcie_share(device: DeviceSample) -> float:
    """Of what the link carries each way as it is trained now; zero where that is not known."""
    lane = _LANE_BYTES_PER_SECOND.get(device.pcie_generation or 0)
    rates = (device.pcie_tx_bytes_per_second, device.pcie_rx_bytes_per_second)
    known = [rate for rate in rates if rate is not None]
    if lane is None or not device.pcie_width or not known:
        return 0.0
    return max(known) / (lane * device.pcie_width)


BOUND_RULES: tuple[Rule, ...] = (host_bound, communication_bound, offload_bound)

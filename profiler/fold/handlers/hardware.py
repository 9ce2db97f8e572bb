"""How what is read of the hardware is folded."""

from __future__ import annotations

from llmtop.profiler.fold.batch import Batch
from llmtop.profiler.fold.energy import add_energy
from llmtop.profiler.fold.handlers.handler import Handler
from llmtop.profiler.fold.rankstate import larger
from llmtop.profiler.fold.readingsfold import (
    add_throttles,
    count_throttles,
    first_ecc,
    lost_devices,
    raise_peaks,
)
from llmtop.profiler.fold.runstate import HISTORY_SAMPLES
from llmtop.profiler.record.deviceevents import LeftOutSamples
from llmtop.profiler.record.events import HardwareSampled, TopologySeen, XidSeen


def _hardware_sampled(batch: Batch, event: HardwareSampled) -> None:
    if event.left_out is not None:
        _left_out(batch, event.left_out)
    batch.add_sample(event)
    state, host = batch.state, event.host
    used = host.memory_in_use_bytes
    batch.set(
        hardware=event,
        first_host=host if state.first_host is None else state.first_host,
        hardware_history=(*state.hardware_history[1 - HISTORY_SAMPLES :], event),
        hardware_samples=state.hardware_samples + 1,
        throttled_samples=count_throttles(state.throttled_samples, event),
        energy=add_energy(state.energy, event),
        first_ecc_uncorrected=first_ecc(state.first_ecc_uncorrected, event),
        lost_devices=lost_devices(state.lost_devices, event),
        peak_device_bytes=raise_peaks(
            state.peak_device_bytes, ((d.index, d.memory_used_bytes) for d in event.devices)
        ),
        peak_pss_bytes=raise_peaks(
            state.peak_pss_bytes, ((p.rank, p.own_pss_bytes) for p in event.processes)
        ),
        peak_rss_bytes=raise_peaks(
            state.peak_rss_bytes, ((p.rank, p.own_rss_bytes) for p in event.processes)
        ),
        peak_compiler_bytes=raise_peaks(
            state.peak_compiler_bytes, ((p.rank, p.compiler_rss_bytes or None) for p in event.processes)
        ),
        peak_host_bytes=larger(state.peak_host_bytes, used),
        peak_cgroup_bytes=larger(state.peak_cgroup_bytes, host.cgroup_used_bytes),
        peak_swap_bytes=larger(state.peak_swap_bytes, host.swap_used_bytes),
    )


def _left_out(batch: Batch, left_out: LeftOutSamples) -> None:
    """Samples between the one before and the next, as far as they were added up."""
    state = batch.state
    batch.set(
        hardware_samples=state.hardware_samples + left_out.samples,
        throttled_samples=add_throttles(state.throttled_samples, left_out.throttled),
        lost_devices=state.lost_devices | set(left_out.lost),
        peak_device_bytes=raise_peaks(state.peak_device_bytes, left_out.device_bytes.items()),
        peak_pss_bytes=raise_peaks(state.peak_pss_bytes, left_out.pss_bytes.items()),
        peak_rss_bytes=raise_peaks(state.peak_rss_bytes, left_out.rss_bytes.items()),
        peak_compiler_bytes=raise_peaks(state.peak_compiler_bytes, left_out.compiler_bytes.items()),
        peak_host_bytes=larger(state.peak_host_bytes, left_out.host_bytes),
        peak_cgroup_bytes=larger(state.peak_cgroup_bytes, left_out.cgroup_bytes),
        peak_swap_bytes=larger(state.peak_swap_bytes, left_out.swap_bytes),
    )


def _xid_seen(batch: Batch, event: XidSeen) -> None:
    state = batch.state
    counts = {**state.xid_counts, event.device: state.xid_counts.get(event.device, 0) + 1}
    is_new = not any((seen.device, seen.xid) == (event.device, event.xid) for seen in state.xids)
    batch.set(xid_counts=counts, xids=(*state.xids, event) if is_new else state.xids)


HANDLERS: dict[type, Handler] = {
    TopologySeen: lambda batch, event: batch.set(topology=event.topology),
    HardwareSampled: _hardware_sampled,
    XidSeen: _xid_seen,
}

"""What others than the run did on its machine and its devices, by one sample of the hardware."""

from __future__ import annotations

from llmtop.profiler.record.events import HardwareSampled


def others_share(sample: HardwareSampled) -> float | None:
    """Of all processors, in percent, what others than the ranks used; None where the sample does not tell."""
    host = sample.host
    own = [process.cpu_percent for process in sample.processes]
    if host.cpu_percent is None or not host.cpu_count or not own or None in own:
        return None
    ranks = sum(used for used in own if used is not None) / host.cpu_count
    return max(0.0, host.cpu_percent - ranks)


def device_is_shared(sample: HardwareSampled) -> bool:
    """Whether more than one process was on a device of the run."""
    return any((device.process_count or 0) > 1 for device in sample.devices)

"""What events say of devices, host and processes: how GPUs are built in and connected, and samples of them.

Like the events themselves these are only added to: an optional field may be new, none changes its meaning.
"""

from typing import Annotated

from msgspec import Meta, Struct

MOST_DEVICES = 256
"""Of one machine; views compare each with all others."""
AFew = Meta(max_length=MOST_DEVICES)
"""Devices, or links of one; a line that has more is none of a run."""


class TopologyDevice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one GPU is built in. None: the driver does not tell."""

    index: int
    name: str | None = None
    pci_bus_id: str | None = None
    numa_node: int | None = None
    cpus: str | None = None
    """Processors near it, as `0-47,96-143`."""
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    """Of device and slot together."""
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks: int | None = None
    """Links that are up; 0 for a device that has none."""
    nvlink_peer: str | None = None
    """`switch` or `gpu`: what is at the other end of its links."""
    nvlink_bytes_per_second: float | None = None
    """Of all links that are up together, each way."""
    has_gpm: bool | None = None
    """Whether it measures the activity of its parts (Hopper and newer)."""
    slowdown_celsius: float | None = None
    """Temperature at which it lowers its clocks."""
    ecc_enabled: bool | None = None
    mig_enabled: bool | None = None


class TopologyPair(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The road between two GPUs."""

    first: int
    second: int
    road: str | None = None
    """As nvidia-smi writes it: NV18 (18 links), PIX, PXB, PHB, NODE or SYS."""
    nvlinks: int | None = None
    peer_access: bool | None = None
    """Whether one may read the other's memory directly."""


class Topology(Struct, frozen=True, kw_only=True, omit_defaults=True):
    devices: Annotated[tuple[TopologyDevice, ...], AFew] = ()
    pairs: Annotated[tuple[TopologyPair, ...], Meta(max_length=MOST_DEVICES**2 // 2)] = ()
    """Each pair once, the smaller index first."""
    own_cpus: str | None = None
    """Processors that the process may use which read this; the ranks that it starts inherit them."""


class LinkSample(Struct, frozen=True, array_like=True, gc=False):
    """One NVLink at one time, written as a list because there are up to 18 of a GPU."""

    link: int
    tx_bytes_per_second: int | None = None
    rx_bytes_per_second: int | None = None
    crc_errors: int | None = None
    """Since the driver was loaded, as the next two."""
    replays: int | None = None
    recoveries: int | None = None


class DeviceSample(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One GPU at one time. None: the driver does not tell."""

    index: int
    name: str | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    own_memory_bytes: int | None = None
    """Used by this run's processes; listed less often, as PSS is."""
    utilization_percent: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    nvlink_tx_bytes_per_second: float | None = None
    nvlink_rx_bytes_per_second: float | None = None
    pcie_tx_bytes_per_second: float | None = None
    pcie_rx_bytes_per_second: float | None = None
    process_count: int | None = None
    is_lost: bool = False
    """The driver says that the device is gone or has to be reset."""
    sm_active_percent: float | None = None
    """Share of the SMs that had work, as the next ones by GPM and since the sample before."""
    sm_occupancy_percent: float | None = None
    """Warps in flight, of the most there can be."""
    tensor_active_percent: float | None = None
    dram_active_percent: float | None = None
    """Memory traffic, of the most there can be."""
    fp32_active_percent: float | None = None
    fp16_active_percent: float | None = None
    energy_joules: float | None = None
    """Since the driver was loaded."""
    ecc_corrected: int | None = None
    """Since the driver was loaded."""
    ecc_uncorrected: int | None = None
    remapped_rows: int | None = None
    """Memory rows that were replaced for good, for errors of both kinds."""
    remap_pending: bool | None = None
    """Rows wait for a reset of the device to be replaced."""
    remap_failed: bool | None = None
    retired_pages: int | None = None
    """What devices older than Ampere do in place of remapping."""
    retirement_pending: bool | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_replays: int | None = None
    nvlinks_active: int | None = None
    links: Annotated[tuple[LinkSample, ...], AFew] = ()
    """Read less often than the rest, and empty in the samples between."""


class OtherWork(Struct, frozen=True, kw_only=True, gc=False):
    """What a program took of the processors that is not the run's, all its processes together."""

    name: str
    """As the kernel keeps it: 15 characters at most, and no arguments."""
    processes: int
    cpu_percent: float
    """100 is one processor."""
    pids: tuple[int, ...] = ()
    """Of the busiest of them, the first the most; empty in records of older versions."""
    users: tuple[str, ...] = ()
    """Whose those are, each once, as far as that can be told."""


class HostSample(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    """The tightest memory limit of the run's cgroups; None where there is none."""
    cgroup_used_bytes: int | None = None
    """Of the group with that limit, without page cache that the kernel can take back."""
    swap_used_bytes: int | None = None
    cpu_percent: float | None = None
    """Of the whole machine, 0 to 100."""
    cpu_count: int | None = None
    """Processors that this is of, threads of a core each."""
    cpu_limit_cores: float | None = None
    """The tightest limit of the run's cgroups; None where there is none."""
    cpu_throttled_percent: float | None = None
    """Of the limit's periods since the sample before: those in which it was used up before their end."""
    other_work: tuple[OtherWork, ...] = ()
    """The busiest programs beside the run, the first the most. Read less often, and repeated in between."""
    disk_read_bytes_per_second: float | None = None
    disk_write_bytes_per_second: float | None = None
    nvme_read_bytes_per_second: float | None = None
    """Of the NVMe drives together, which are among the disks; None: there are none."""
    nvme_write_bytes_per_second: float | None = None
    network_receive_bytes_per_second: float | None = None
    network_send_bytes_per_second: float | None = None
    links_down: tuple[str, ...] = ()
    """Network links that were up in the run's first sample and are not now, by name."""
    link_losses: int | None = None
    """How often network links went down, all together, since the machine was started."""
    network_errors: int | None = None
    """Of all links since the machine was started: what came or went damaged."""
    log_bytes: int | None = None
    """Of what the supervisor had written to its own log by then."""

    @property
    def memory_in_use_bytes(self) -> int | None:
        """By everybody, without what the kernel can take back."""
        if self.memory_total_bytes is None or self.memory_available_bytes is None:
            return None
        return self.memory_total_bytes - self.memory_available_bytes


class ProcessSample(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One rank's process tree."""

    rank: int
    rss_bytes: int | None = None
    pss_bytes: int | None = None
    """Proportional set size: shared pages divided among those who share them. Read less often than RSS;
    the samples between two readings repeat the first."""
    cpu_percent: float | None = None
    """100 is one core."""
    cpu_wait_percent: float | None = None
    """How long its threads were ready to run and had no processor: 100 is one thread all the time. Read less
    often, and repeated in between."""
    log_bytes: int | None = None
    """Of what the rank had written to its log by then, so that a replay shows no more of it."""
    compiler_rss_bytes: int = 0
    """Part of the tree's: compilers that build an op, which end before the training begins."""
    compiler_pss_bytes: int = 0

    @property
    def own_rss_bytes(self) -> int | None:
        """Without compilers: what is compared with a prediction."""
        return None if self.rss_bytes is None else self.rss_bytes - self.compiler_rss_bytes

    @property
    def own_pss_bytes(self) -> int | None:
        return None if self.pss_bytes is None else self.pss_bytes - self.compiler_pss_bytes


class LeftOutSamples(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Samples that a thinned log does not hold, added up: how many, and the largest readings."""

    samples: int
    throttled: dict[int, dict[str, int]] = {}
    """Device index to throttle reason to samples."""
    device_bytes: dict[int, int] = {}
    rss_bytes: dict[int, int] = {}
    """By rank and without compilers, as the next one."""
    pss_bytes: dict[int, int] = {}
    compiler_bytes: dict[int, int] = {}
    """By rank: of compilers alone, resident."""
    host_bytes: int | None = None
    """In use on the machine."""
    cgroup_bytes: int | None = None
    swap_bytes: int | None = None
    lost: tuple[int, ...] = ()
    """Devices that one of them found gone."""

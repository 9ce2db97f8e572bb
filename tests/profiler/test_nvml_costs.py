"""The cost rule: what takes more than a millisecond never runs in a fast sample, and comes back by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmtop.profiler.hardware.costs import FAST_SECONDS, CallCosts
from llmtop.profiler.hardware.host import HostReader
from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.profiler.hardware.sampler import Sampler
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.recorded import ManualClock

ENERGY = "nvmlDeviceGetTotalEnergyConsumption"
POWER = "nvmlDeviceGetPowerUsage"


class Costly:
    """A reader whose calls take what a test says."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self.time, self.fake = ManualClock(), FakeNvml(*gpus)
        self.seconds: dict[str, float] = {}
        self.fake.spend = lambda name: self.time.advance(self.seconds.get(name, 5e-6))
        self.reader = NvmlReader(self.fake, clock=lambda: self.time.now)

    def count(self, call: str) -> int:
        return self.fake.calls.count(call)

    def slow(self) -> set[str]:
        return {row.call for row in self.reader.call_costs() if row.is_slow}


def counting_gpu() -> FakeGpu:
    gpu = FakeGpu()
    gpu.energy_mj = 1_000
    return gpu


def test_a_dear_reading_leaves_the_fast_clock_and_repeats_its_answer() -> None:
    gpu = counting_gpu()
    costly = Costly(gpu)
    costly.seconds[ENERGY] = 3.5e-3
    for _ in range(2):
        costly.reader.sample()
    assert ENERGY in costly.slow() and POWER not in costly.slow()
    gpu.energy_mj = 9_000
    for _ in range(4):
        (sample,) = costly.reader.sample(fast=True)
        assert sample.energy_joules == 1.0 and sample.power_watts == 612.0
    assert (costly.count(ENERGY), costly.count(POWER)) == (2, 6)
    assert costly.reader.sample()[0].energy_joules == 9.0


def test_rates_of_a_dear_counter_are_repeated_and_not_zero() -> None:
    gpu = counting_gpu()
    costly = Costly(gpu)
    costly.seconds["nvmlDeviceGetFieldValues"] = 2e-3
    costly.reader.sample()
    gpu.fields = {138: 4096, 139: 1024, 197: 10, 198: 10}
    costly.time.advance(1.0)
    (whole,) = costly.reader.sample()
    costly.time.advance(1.0)
    (fast,) = costly.reader.sample(fast=True)
    assert whole.nvlink_tx_bytes_per_second == fast.nvlink_tx_bytes_per_second != 0.0


def test_nothing_of_unknown_cost_runs_in_a_fast_sample() -> None:
    costly = Costly(counting_gpu())
    costly.fake.calls.clear()
    costly.reader.sample(fast=True)
    assert costly.fake.calls == ["nvmlGpmQueryDeviceSupport"], "once, when the device is met"


def test_the_first_call_pays_for_warming_up_and_does_not_count() -> None:
    costly = Costly(counting_gpu())
    costly.seconds[POWER] = 0.3
    costly.reader.sample()
    costly.seconds[POWER] = 1e-5
    costly.reader.sample()
    assert POWER not in costly.slow()


def test_one_call_that_was_held_up_proves_nothing_for_long() -> None:
    costly = Costly(counting_gpu())
    for _ in range(3):
        costly.reader.sample()
    costly.seconds[POWER] = 50e-3
    costly.reader.sample(fast=True)
    assert POWER not in costly.slow()
    costly.seconds[POWER] = 1e-5
    costly.reader.sample(fast=True)
    assert POWER not in costly.slow()


def test_a_reading_that_grows_dear_is_moved_and_comes_back() -> None:
    costly = Costly(counting_gpu())
    for _ in range(3):
        costly.reader.sample()
    costly.seconds[POWER] = 4e-3
    for _ in range(10):
        costly.reader.sample(fast=True)
    assert POWER in costly.slow()
    calls = costly.count(POWER)
    costly.reader.sample(fast=True)
    assert costly.count(POWER) == calls
    costly.seconds[POWER] = 1e-5
    for _ in range(5):
        costly.reader.sample()
    assert POWER not in costly.slow()


def test_each_device_has_its_own_cost() -> None:
    costly = Costly(counting_gpu(), FakeGpu(uuid="GPU-b"))
    for _ in range(3):
        costly.reader.sample()
    rows = [row for row in costly.reader.call_costs() if row.call == POWER]
    assert {row.device for row in rows} == {0, 1}
    assert all(row.seconds is not None and 0 < row.seconds < FAST_SECONDS for row in rows)
    costs = [row.seconds or 0.0 for row in costly.reader.call_costs()]
    assert costs == sorted(costs, reverse=True)


def test_single_links_are_written_only_when_they_are_read() -> None:
    gpu = counting_gpu()
    gpu.links, gpu.link_fields = [1], {(138, 0): 0, (139, 0): 0}
    costly = Costly(gpu)
    for _ in range(3):
        assert len(costly.reader.sample()[0].links) == 1
    (fast,) = costly.reader.sample(fast=True)
    assert fast.links == () and fast.nvlinks_active == 1


def test_the_sampler_runs_dear_readings_with_its_slow_ones() -> None:
    costly = Costly(counting_gpu())
    costly.seconds[ENERGY] = 3.5e-3
    host = HostReader(clock=lambda: costly.time.now)
    sampler = Sampler(
        nvml=costly.reader, host=host, device_indices=(0,), slow_every=4, clock=lambda: costly.time.now
    )
    for _ in range(12):
        sampler.sample({})
        costly.time.advance(1.0)
    assert costly.count(POWER) == 12
    # The first two to learn the cost, then samples 4 and 8.
    assert costly.count(ENERGY) == 4


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 0.01)), min_size=1, max_size=40))
def test_a_fast_sample_never_runs_what_is_known_as_slow(samples: list[tuple[bool, float]]) -> None:
    time = ManualClock()
    costs = CallCosts(lambda: time.now)
    ran: list[bool] = []
    for fast, seconds in samples:
        known = {row.call: row.is_slow for row in costs.table()}
        ran.clear()

        def read(seconds: float = seconds) -> dict[str, int]:
            time.advance(seconds)
            ran.append(True)
            return {"value": 1}

        costs.run("call", 0, read, fast=fast)
        assert bool(ran) == (not fast or not known.get("call", True))

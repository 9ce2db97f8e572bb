"""Which of DeepSpeed's compiled ops a run loads, and what building one takes."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from llmtop.profiler.opwords import OP_WORDS


class Op(Struct, frozen=True, kw_only=True):
    """One op; torch compiles it on first use and keeps it in its extensions folder."""

    name: str
    """As its builder and its folder are named."""
    builder: str
    """Class in `deepspeed.ops.op_builder`."""
    prebuilt: str
    """Its library's name below `deepspeed/ops` where DeepSpeed was installed with ops built."""
    with_nvcc: bool = False
    """On CUDA its builder asks nvcc, even for an op that is built."""
    instead: str = ""
    """What a run can do without it."""

    @property
    def words(self) -> str:
        return OP_WORDS[self.name]


FUSED_ADAM = Op(
    name="fused_adam",
    builder="FusedAdamBuilder",
    prebuilt="adam/fused_adam_op",
    with_nvcc=True,
    instead="--optimizer adamw_torch needs no op",
)
CPU_ADAM = Op(
    name="cpu_adam",
    builder="CPUAdamBuilder",
    prebuilt="adam/cpu_adam_op",
    instead="--offload-optimizer none needs no CPU Adam",
)
PIN_MEMORY = Op(name="pin_memory", builder="PinMemoryBuilder", prebuilt="pin_memory/pin_memory_op")
ASYNC_IO = Op(
    name="async_io",
    builder="AsyncIOBuilder",
    prebuilt="aio/async_io_op",
    with_nvcc=True,
    instead="offload to cpu needs no file access",
)
QUANTIZER = Op(
    name="quantizer",
    builder="QuantizerBuilder",
    prebuilt="quantizer/quantizer_op",
    with_nvcc=True,
    instead="leave zero_quantized_weights out",
)


_OFFLOADS = ("offload_optimizer", "offload_param")


def ops_of(config: dict[str, Any]) -> tuple[Op, ...]:
    """In the order in which the engine asks for them (deepspeed 0.19.8 `runtime/engine.py`)."""
    zero = config.get("zero_optimization") or {}
    devices = {name: (zero.get(name) or {}).get("device", "none") for name in _OFFLOADS}
    found: list[Op] = []
    if "nvme" in devices.values():
        # Its loader loads the other one first.
        found += [PIN_MEMORY, ASYNC_IO]
    if zero.get("zero_quantized_weights"):
        found.append(QUANTIZER)
    optimizer = config.get("optimizer") or {}
    of_torch = (optimizer.get("params") or {}).get("torch_adam", False)
    if str(optimizer.get("type", "")).lower() in ("adam", "adamw") and not of_torch:
        found.append(FUSED_ADAM if devices["offload_optimizer"] == "none" else CPU_ADAM)
    return tuple(found)

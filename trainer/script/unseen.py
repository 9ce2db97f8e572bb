"""A run of a command of the user's own before anything is known of what it trains."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from llmtop.presets.catalog import load_gpu
from llmtop.presets.resolve import Machine, machine_gpu
from llmtop.presets.spec import UNSEEN, ModelShape, Provenance, RunOptions, RunSpec, Script, ValueSource
from llmtop.profiler.memory.result import HostBytes, Moment, Prediction
from llmtop.profiler.record.hosts import Hosts

_NOTHING_YET = "not seen yet"


def unseen_spec(
    command: tuple[str, ...], folder: Path, machine: Machine, *, hosts: Hosts | None = None, gpu: str = "auto"
) -> RunSpec:
    """What holds until the script's processes tell of themselves: the machine or the hosts, and the command.

    `gpu` is the preset of what the hosts have; by default as this machine, which is no GPU that the spec
    `knows` while its driver does not answer. Raises UsageError for none.
    """
    chosen, from_ = machine_gpu(machine), _from_machine(machine)
    if gpu != "auto":
        chosen, from_ = load_gpu(gpu), Provenance(source=ValueSource.COMMAND_LINE, detail=f"--gpu {gpu}")
    counts = [len(host.slots) for host in hosts.hosts] if hosts is not None else [1]
    # How many processes the command starts is its own affair.
    options = RunOptions(
        model=_NOTHING_YET,
        gpu=chosen.name,
        gpus=max(counts),
        nodes=len(counts),
        total_gpus=sum(counts) if len(set(counts)) > 1 else None,
    )
    shape = ModelShape(
        name=_NOTHING_YET,
        family=UNSEEN,
        num_layers=1,
        hidden_size=1,
        intermediate_size=0,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=1,
    )
    return RunSpec(
        name=Path(named_after(command)).stem or "script",
        options=options,
        model=shape,
        gpu=chosen,
        model_source="",
        provenance={"gpu": from_},
        script=Script(command=command, folder=str(folder)),
    )


def with_devices(spec: RunSpec, machine: Machine) -> RunSpec:
    """The same once the machine's driver has answered."""
    gpu = machine_gpu(machine)
    return replace(
        spec,
        options=replace(spec.options, gpu=gpu.name),
        gpu=gpu,
        provenance={**spec.provenance, "gpu": _from_machine(machine)},
    )


def _from_machine(machine: Machine) -> Provenance:
    if machine.driver_silent:
        return Provenance(source=ValueSource.DEFAULT, detail="the driver of the GPUs has not answered")
    return Provenance(source=ValueSource.MACHINE, detail="what this machine has")


def named_after(command: tuple[str, ...]) -> str:
    """The word of a command that a person would call it by: its first Python file, else its program."""
    return next((word for word in command if word.endswith(".py")), command[0])


def unseen_prediction() -> Prediction:
    """Nothing is predicted: `is_known` is False, and every view shows n/a."""
    return Prediction(
        params=0,
        trainable_params=0,
        fits=None,
        peak_allocated_bytes=0,
        peak_allocated_upper_bytes=0,
        peak_reserved_bytes=(0, 0),
        peak_device_bytes=None,
        host_bytes=0,
        pinned_bytes=0,
        nvme_bytes=0,
        step_seconds=None,
        tokens_per_second=None,
        moments=(),
        peak_moment=Moment.STEADY,
        host=HostBytes(total_bytes=0, pinned_bytes=0, nvme_bytes=0, components={}),
        device_memory_bytes=None,
    )

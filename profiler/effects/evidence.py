"""Whether what was asked for is really on: the modules that were built and the kernels that ran.

Three things are told apart: what the options ask for, what the built modules hold, and what the profiler
saw run. The last one decides; where it saw nothing, the modules do; where neither says anything, it is
not known.
"""

from __future__ import annotations

from msgspec import Struct

from llmtop.presets.liger import in_order, kernels_on
from llmtop.presets.spec import RunSpec
from llmtop.presets.truth import is_true
from llmtop.profiler.effects.kernelnames import ATTENTION_WORDS, FUSED_ATTENTION, AttentionKernel
from llmtop.profiler.fold.rankstate import RankState
from llmtop.profiler.memory.result import Component
from llmtop.profiler.memory.sizes import Sizes, sizes_of
from llmtop.profiler.memory.swapped import SMALLEST_BYTES, kept_param_bytes, max_in_cpu, swaps_optimizer
from llmtop.profiler.record.events import KernelsSeen, MemoryClassified
from llmtop.profiler.units import counted, format_bytes

OPTIMIZER_KERNELS: dict[str, str] = {
    "deepspeed_fused_adam": "DeepSpeed's fused Adam",
    "deepspeed_cpu_adam": "DeepSpeed's Adam for the CPU",
    "torch_fused_adam": "torch's fused Adam",
    "torch_foreach_adam": "torch's Adam over lists of tensors",
    "torch_single_tensor_adam": "torch's Adam, tensor by tensor",
    "bitsandbytes_8bit": "bitsandbytes with 8-bit states",
    "bitsandbytes_32bit": "bitsandbytes with 32-bit states",
}
_ATTENTION: dict[str, frozenset[str]] = {
    "eager": frozenset({AttentionKernel.UNFUSED}),
    "sdpa": FUSED_ATTENTION,
    "flash_attention_2": frozenset({AttentionKernel.FLASH_2}),
    "flash_attention_3": frozenset({AttentionKernel.FLASH_3}),
    "flash_attention_4": frozenset({AttentionKernel.FLASH_4}),
}
_OPTIMIZER_CLASSES: dict[str, frozenset[str]] = {
    "adamw": frozenset({"FusedAdam", "DeepSpeedCPUAdam"}),
    "adamw_torch": frozenset({"AdamW", "Adam"}),
    "adamw_8bit": frozenset({"AdamW8bit", "Adam8bit"}),
    "paged_adamw_8bit": frozenset({"PagedAdamW8bit"}),
    "paged_adamw_32bit": frozenset({"PagedAdamW32bit", "PagedAdamW"}),
}
_OPTIMIZER_OF_KERNEL: dict[str, frozenset[str]] = {
    "deepspeed_fused_adam": frozenset({"adamw"}),
    "deepspeed_cpu_adam": frozenset({"adamw"}),
    "torch_fused_adam": frozenset({"adamw_torch"}),
    "torch_foreach_adam": frozenset({"adamw_torch"}),
    "torch_single_tensor_adam": frozenset({"adamw_torch"}),
    "bitsandbytes_8bit": frozenset({"adamw_8bit", "paged_adamw_8bit"}),
    "bitsandbytes_32bit": frozenset({"paged_adamw_32bit", "adamw_8bit", "paged_adamw_8bit"}),
}
"""Tensors of fewer than 4,096 elements keep 32-bit states under an 8-bit optimizer of bitsandbytes."""
_QUANTIZED: dict[str, tuple[str, ...]] = {"nf4": ("4bit_dequantize", "4bit_gemv"), "int8": ("int8_matmul",)}


class Evidence(Struct, frozen=True, kw_only=True):
    on: bool | None
    """Whether what was asked for is what runs; None: nothing tells."""
    words: str
    """What tells it."""


_NOTHING = Evidence(on=None, words="nothing recorded yet")
_NO_KERNELS = Evidence(on=None, words="no step's kernels are recorded")
"""The profiler was not asked, or the run has not come, or will not come, to the step that it looks at."""


def attention(spec: RunSpec, rank: RankState | None) -> Evidence:
    asked = spec.options.attention
    ran = rank.kernels.attention if rank and rank.kernels else None
    if ran is not None:
        return Evidence(on=ran in _ATTENTION[asked], words=f"ran: {attention_words(ran)}")
    built = rank.model.attention if rank and rank.model else None
    if built is None:
        return _NOTHING
    if built != asked:
        return Evidence(on=False, words=f"the modules use {built}")
    seen = _NO_KERNELS.words if rank is None or rank.kernels is None else "no kernel of it was recognised"
    return Evidence(on=None, words=f"the modules use {built}; {seen}")


def liger(spec: RunSpec, rank: RankState | None) -> Evidence:
    if rank is None or rank.model is None:
        return _NOTHING
    wanted = kernels_on(spec)
    built = frozenset(rank.model.liger)
    kernels = rank.kernels
    ran = frozenset(kernels.liger) if kernels is not None else None
    if not wanted:
        found = in_order(built | (ran or frozenset()))
        return Evidence(on=not found, words=f"{', '.join(found)} found" if found else "none of it is there")
    missing = in_order(wanted - built if ran is None else wanted - ran)
    if missing:
        where = "in the modules" if ran is None else "among the kernels that ran"
        return Evidence(on=False, words=f"{', '.join(missing)} not {where}")
    if ran is None:
        return Evidence(on=True, words=f"in the modules: {', '.join(in_order(built))}")
    return Evidence(on=True, words=f"ran: {', '.join(in_order(ran))}")


def optimizer(spec: RunSpec, rank: RankState | None) -> Evidence:
    asked, built = spec.options.optimizer, rank.model.optimizer if rank and rank.model else None
    ran = rank.kernels.optimizer if rank and rank.kernels else None
    if built is None and ran is None:
        return _NOTHING
    words = [f"class {built}"] if built else []
    words += [f"ran: {OPTIMIZER_KERNELS.get(ran, ran)}"] if ran else []
    if "optimizer" in spec.options.deepspeed:
        return Evidence(on=None, words="; ".join([*words, "the DeepSpeed configuration names another"]))
    by_class = None if built is None else built in _OPTIMIZER_CLASSES[asked]
    if spec.on_cpu and asked == "adamw":
        # There DeepSpeed is told to take torch's, which it has not to compile (`trainer.dsconfig`).
        by_class = None if built is None else built in _OPTIMIZER_CLASSES[asked] | {"AdamW"}
    elif ran is not None and by_class is not False:
        return Evidence(on=asked in _OPTIMIZER_OF_KERNEL.get(ran, ()), words="; ".join(words))
    return Evidence(on=by_class, words="; ".join(words))


def quantization(spec: RunSpec, rank: RankState | None) -> Evidence:
    built = rank.model if rank else None
    if spec.options.qat != "none":
        if built is None:
            return _NOTHING
        words = f"{counted(built.rounding_layers, 'layer')} rounding for {built.qat or 'nothing'}"
        return Evidence(on=built.qat == spec.options.qat, words=words)
    asked = spec.options.quantization
    kernels = rank.kernels if rank else None
    if kernels is None:
        return _NO_KERNELS
    ran = ", ".join(kernels.quantization)
    if asked == "none":
        return Evidence(on=not ran, words=f"ran: {ran}" if ran else "no kernel of it ran")
    if spec.on_cpu and not ran:
        return Evidence(on=None, words="the CPU's operators do not show it")
    seen = any(name in kernels.quantization for name in _QUANTIZED[asked])
    return Evidence(on=seen, words=f"ran: {ran}" if ran else "no kernel of it ran")


def lora(spec: RunSpec, rank: RankState | None) -> Evidence:
    built = rank.model if rank else None
    if built is None:
        return _NOTHING
    is_part = built.trainable_params < built.params
    share = f"{built.trainable_params:,} of {built.params:,} parameters are trained"
    return Evidence(on=is_part == (spec.options.lora_rank > 0), words=share)


def checkpointing(spec: RunSpec, rank: RankState | None) -> Evidence:
    """A block that is recomputed computes its attention twice."""
    kernels, layers = rank.kernels if rank else None, spec.model.num_layers
    if kernels is None:
        return _NO_KERNELS
    calls = kernels.attention_calls
    if not calls or (kernels.attention == AttentionKernel.UNFUSED and spec.model.moe is not None):
        # A router's softmax cannot be told from an attention's.
        return Evidence(on=None, words="no forward pass of attention was recognised")
    asked = spec.options.gradient_checkpointing
    words = f"attention's forward ran {calls} times for {layers} layers"
    return Evidence(on=(calls > layers) == asked, words=words)


def zero(spec: RunSpec, rank: RankState | None) -> Evidence:
    wrapper = rank.model.engine_optimizer if rank and rank.model else None
    if wrapper is None:
        return _NOTHING
    stage = spec.options.zero
    on: bool | None
    if "Stage3" in wrapper:
        on = stage == 3
    elif "DeepSpeedZeroOptimizer" in wrapper:
        on = stage in (1, 2)
    else:
        # A wrapper for 16-bit alone can stand for stage 0 and, under some settings, for stage 1.
        on = {0: True, 3: False}.get(stage)
    return Evidence(on=on, words=f"DeepSpeed runs {wrapper}")


def offload(spec: RunSpec, rank: RankState | None) -> Evidence:
    options = spec.options
    wanted = {
        Component.OPTIMIZER_STATE: options.offload_optimizer,
        Component.PARAMETERS: options.offload_param,
    }
    seen = list(rank.classified.values()) if rank else []
    swaps = "nvme" in wanted.values()
    if spec.on_cpu and not swaps:
        return Evidence(on=None, words="all is in host RAM")
    if not seen:
        return Evidence(on=None, words="no tensors were counted yet")
    drives = [event.drive_components for event in seen if event.drive_components is not None]
    if swaps and not drives:
        return Evidence(on=None, words="what lies on the drive was not recorded")
    told = []
    for component, where in wanted.items():
        if where == "nvme":
            told.append(_on_drive(spec, component, max(drive.get(component, 0) for drive in drives)))
        elif not spec.on_cpu:
            told.append(_in_host_memory(component, where, seen))
    # What DeepSpeed's own limits leave in memory is nothing that failed, unless it is everything.
    known = [one.on for one in told if one.on is not None]
    return Evidence(on=bool(known) and all(known), words=", ".join(one.words for one in told))


def _in_host_memory(component: Component, where: str, seen: list[MemoryClassified]) -> Evidence:
    held = max(event.host_components.get(component, 0) for event in seen)
    words = f"{_plain(component)} {'partly or all ' if held else 'not '}in host RAM"
    return Evidence(on=(held > 0) == (where == "cpu"), words=words)


def _on_drive(spec: RunSpec, component: Component, held: int) -> Evidence:
    """By the bytes of DeepSpeed's files of it; None where it leaves so few in memory."""
    what, sizes = _plain(component), sizes_of(spec)
    if held:
        return Evidence(on=True, words=f"{what} on NVMe ({format_bytes(held)})")
    if component is Component.PARAMETERS and sizes.shard <= max_in_cpu(spec):
        why = f"offload_param.max_in_cpu leaves {max_in_cpu(spec):,} elements of each rank there"
    elif _all_small(spec, sizes, component):
        why = f"DeepSpeed swaps no tensor below {format_bytes(SMALLEST_BYTES)}"
    else:
        return Evidence(on=False, words=f"{what} not on NVMe")
    return Evidence(on=None, words=f"{what} in host RAM: {why}")


def _all_small(spec: RunSpec, sizes: Sizes, component: Component) -> bool:
    """Whether nothing of it is large enough to be swapped."""
    if component is Component.OPTIMIZER_STATE:
        return not swaps_optimizer(spec, sizes)
    return kept_param_bytes(spec, sizes) >= sizes.dtype_bytes * sizes.shard


def _plain(component: Component) -> str:
    return component.replace("_", " ")


def micro_batch(spec: RunSpec, rank: RankState | None) -> Evidence:
    step = rank.last_step if rank else None
    if step is None:
        return _NOTHING
    return Evidence(
        on=step.micro_batch == spec.options.micro_batch, words=f"{step.micro_batch} in the newest step"
    )


def grad_accum(spec: RunSpec, rank: RankState | None) -> Evidence:
    step = rank.last_step if rank else None
    if step is None:
        return _NOTHING
    return Evidence(
        on=step.grad_accum == spec.options.grad_accum, words=f"{step.grad_accum} in the newest step"
    )


def precision(spec: RunSpec, rank: RankState | None) -> Evidence:
    if rank is None or rank.model is None:
        return _NOTHING
    built = rank.model.weights_type
    if built is None:
        return Evidence(on=None, words="the type of the weights was not recorded")
    # Under autocast the products have another type than the weights.
    told = built == spec.options.precision or not (spec.script is not None or _autocasts(spec))
    return Evidence(on=built == spec.options.precision if told else None, words=f"the weights are {built}")


def _autocasts(spec: RunSpec) -> bool:
    autocast = spec.options.deepspeed.get("torch_autocast")
    return isinstance(autocast, dict) and is_true(autocast.get("enabled"))


def attention_words(kernel: str) -> str:
    return ATTENTION_WORDS.get(kernel, kernel)


def ran_words(kernels: KernelsSeen | None) -> dict[str, str | None]:
    """What ran, in words, by what it is; None where nothing of it was recognised."""
    if kernels is None:
        return dict.fromkeys(("attention", "liger", "optimizer", "loss", "quantization", "communication"))
    return {
        "attention": attention_words(kernels.attention) if kernels.attention else None,
        "liger": ", ".join(in_order(kernels.liger)) or None,
        "optimizer": OPTIMIZER_KERNELS.get(kernels.optimizer, kernels.optimizer)
        if kernels.optimizer
        else None,
        "loss": kernels.loss.replace("_", " ") if kernels.loss else None,
        "quantization": ", ".join(kernels.quantization).replace("_", " ") or None,
        "communication": ", ".join(kernels.communication).replace("_", " ") or None,
    }

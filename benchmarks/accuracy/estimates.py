"""What others' published estimates say of the same runs: bytes, or why they have no answer.

Each is written from its published formula; DeepSpeed's own functions are called as installed, in a
subprocess. A run that a form does not speak of (adapters, offload, a sharding it has no term for) is not
held against it: it gets a reason instead of a figure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence

from msgspec import Struct

from benchmarks.rows import Row
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.shape import param_count, tensors

DEEPSPEED_SECONDS = 300.0
_DEEPSPEED = """
import json, sys
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as stage_3
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as stage_2
asked = json.load(sys.stdin)
print(json.dumps([(stage_3 if stage == 3 else stage_2)(**given)[1] for stage, given in asked]))
"""
_FULL = "trains every weight only"


class Estimate(Struct, frozen=True, kw_only=True):
    """Bytes on one GPU, or the reason why there are none."""

    bytes: int | None = None
    reason: str = ""


class Rival(Struct, frozen=True, kw_only=True):
    name: str
    source: str
    counts: str
    """What its figure is meant to hold, by its own words."""


DEEPSPEED = Rival(
    name="DeepSpeed estimate_zero{2,3}",
    source="deepspeed.runtime.zero, the installed library's functions",
    counts="model states",
)
ACCELERATE = Rival(
    name="accelerate estimate-memory",
    source="accelerate/commands/estimate.py: estimate_training_usage",
    counts="training with Adam at batch 1",
)
ELEUTHER = Rival(
    name="EleutherAI transformer math",
    source="https://blog.eleuther.ai/transformer-math/",
    counts="model, optimizer, gradients, activations",
)
MEGATRON = Rival(
    name="Megatron",
    source="Korthikanti et al. 2022, arXiv 2205.05198, and Megatron-LM's bytes a parameter",
    counts="model, optimizer, gradients, activations, loss",
)
MEMTRACKER = Rival(
    name="torch MemTracker",
    source="torch.distributed._tools.mem_tracker under FakeTensorMode",
    counts="a traced step of a plain torch loop",
)


def _none(reason: str) -> Estimate:
    return Estimate(reason=reason)


def _beyond(spec: RunSpec, *, offload: bool = False) -> str | None:
    """What none of these forms has a term for; `offload`: this one has."""
    options = spec.options
    if options.lora_rank or options.quantization != "none":
        return _FULL
    if not offload and (options.offload_optimizer != "none" or options.offload_param != "none"):
        return "knows no offload"
    if options.optimizer.startswith("paged"):
        return "knows no paged optimizer"
    return None


def accelerate_bytes(spec: RunSpec) -> Estimate:
    """Four times the model in the dtype: at 16 bits twice the fp32 size, at 32 four times."""
    reason = _beyond(spec)
    if reason is None and spec.options.optimizer == "adamw_8bit":
        reason = "Adam with fp32 states only"
    if reason is None and spec.world_size > 1 and spec.options.zero:
        reason = "knows no sharding"
    if reason is not None:
        return _none(reason)
    width = 4 if spec.options.precision == "fp32" else 2
    return Estimate(bytes=4 * width * param_count(spec.model))


def eleuther_bytes(spec: RunSpec) -> Estimate:
    """Model, optimizer and gradients by ZeRO stage, and one of the three activation forms."""
    activations = _activations(spec)
    reason = _beyond(spec) or activations.reason
    if reason or activations.bytes is None:
        return _none(reason)
    options, count, ranks = spec.options, param_count(spec.model), spec.world_size
    width = 4 if options.precision == "fp32" else 2
    copy = 0 if options.precision == "fp32" else 4
    moments = 2 if options.optimizer == "adamw_8bit" else 8
    optimizer = (copy + moments) * count // (ranks if options.zero >= 1 else 1)
    gradients = width * count // (ranks if options.zero >= 2 else 1)
    model = width * count // (ranks if options.zero >= 3 else 1)
    return Estimate(bytes=model + optimizer + gradients + activations.bytes)


def megatron_bytes(spec: RunSpec) -> Estimate:
    """18 bytes a parameter (fp32 gradients), 12 of them sharded by its distributed optimizer."""
    activations = _activations(spec)
    reason = _beyond(spec) or activations.reason
    options = spec.options
    if not reason and options.optimizer == "adamw_8bit":
        reason = "Adam with fp32 states only"
    if not reason and spec.world_size > 1 and options.zero >= 2:
        reason = "shards the optimizer only"
    if reason or activations.bytes is None:
        return _none(reason)
    count, model = param_count(spec.model), spec.model
    states = 16 * count if options.precision == "fp32" else 6 * count
    if options.precision != "fp32":
        states += 12 * count // (spec.world_size if options.zero else 1)
    tokens = options.micro_batch * options.seq_len
    # Dropout of the embeddings, the last norm, the head's input, and the logits in fp32.
    ends = tokens * model.hidden_size * 5 + 4 * tokens * model.vocab_size
    return Estimate(bytes=states + activations.bytes + ends)


def _activations(spec: RunSpec) -> Estimate:
    """Bytes of all layers without tensor parallelism: s b h (34 + 5 a s / h), s b h 34 or 2 s b h each."""
    options, model = spec.options, spec.model
    if options.gradient_checkpointing and options.checkpointing_every > 1:
        return _none("recomputes every layer or none")
    tokens = options.micro_batch * options.seq_len
    of_layer = 2 if options.gradient_checkpointing else 34
    whole = of_layer * tokens * model.hidden_size * model.num_layers
    if options.attention == "eager" and not options.gradient_checkpointing:
        whole += 5 * model.num_heads * options.seq_len * tokens * model.num_layers
    return Estimate(bytes=whole)


CLOSED_FORMS: dict[str, Callable[[RunSpec], Estimate]] = {
    ACCELERATE.name: accelerate_bytes,
    ELEUTHER.name: eleuther_bytes,
    MEGATRON.name: megatron_bytes,
}
RIVALS = (DEEPSPEED, ACCELERATE, ELEUTHER, MEGATRON, MEMTRACKER)


def deepspeed_estimates(specs: Sequence[RunSpec]) -> list[Estimate]:
    """By DeepSpeed's own functions, all in one subprocess. Raises CalledProcessError without DeepSpeed."""
    reasons = [_deepspeed_reason(spec) for spec in specs]
    asked = [
        _deepspeed_arguments(spec) for spec, reason in zip(specs, reasons, strict=True) if reason is None
    ]
    found = iter(_ask_deepspeed(asked))
    return [_none(reason) if reason else Estimate(bytes=next(found)) for reason in reasons]


def _deepspeed_reason(spec: RunSpec) -> str | None:
    options = spec.options
    if options.zero < 2:
        return f"has no estimate for stage {options.zero}"
    if options.optimizer == "adamw_8bit":
        return "Adam with fp32 states only"
    if options.precision == "fp32":
        return "16-bit weights only"
    return _beyond(spec, offload=True)


def _deepspeed_arguments(spec: RunSpec) -> tuple[int, Row]:
    options = spec.options
    given: Row = {
        "total_params": param_count(spec.model),
        "num_gpus_per_node": options.gpus,
        "num_nodes": options.nodes,
        "cpu_offload": options.offload_optimizer != "none",
    }
    if options.zero == 3:
        # Its largest layer is the module with the most weights of its own, hence a single matrix.
        given["largest_layer_params"] = max(group.numel for group in tensors(spec.model))
        given["cpu_offload_params"] = options.offload_param != "none"
    return options.zero, given


def _ask_deepspeed(asked: Sequence[tuple[int, Row]]) -> list[int]:
    if not asked:
        return []
    ended = subprocess.run(
        [sys.executable, "-c", _DEEPSPEED],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=DEEPSPEED_SECONDS,
        check=True,
    )
    found: list[int] = json.loads(ended.stdout.splitlines()[-1])
    return found

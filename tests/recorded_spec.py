"""The specs and predictions of recorded runs."""

from __future__ import annotations

from typing import Any, Literal

from llmtop.presets.spec import GpuSpec, ModelShape, RunOptions, RunSpec
from llmtop.profiler.cost import shape
from llmtop.profiler.memory.result import Component, HostBytes, Moment, MomentBytes, Prediction

GIB = 1024**3
MIB = 1024**2

Kind = Literal["cpu", "cuda"]


def tiny_llama() -> ModelShape:
    return ModelShape(
        name="tiny-llama",
        family="llama",
        num_layers=4,
        hidden_size=256,
        intermediate_size=688,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        vocab_size=2048,
        max_positions=1024,
        tied_embeddings=True,
    )


def llama_8b() -> ModelShape:
    return ModelShape(
        name="llama-3.1-8b",
        family="llama",
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_positions=131072,
    )


def recorded_spec(kind: Kind = "cpu", *, ranks: int = 2, steps: int = 60, **options: Any) -> RunSpec:
    """The spec of a recorded run; `options` are further RunOptions."""
    if kind == "cpu":
        chosen = RunOptions(
            **{
                "model": "tiny-llama",
                "gpu": "cpu",
                "gpus": ranks,
                "zero": 2,
                "precision": "fp32",
                "micro_batch": 4,
                "seq_len": 256,
                "steps": steps,
                "learning_rate": 2e-3,
                **options,
            }
        )
        gpu = GpuSpec(name="cpu", kind="cpu", memory_bytes=24 * GIB)
        model = tiny_llama()
    else:
        chosen = RunOptions(
            **{"model": "llama-3.1-8b", "gpu": "h200", "gpus": ranks, "zero": 2, "steps": steps, **options}
        )
        flops = {"bf16": 989.4e12}
        gpu = GpuSpec(name="h200", memory_bytes=150_754_820_096, dense_flops_per_second=flops)
        model = llama_8b()
    return RunSpec(
        name="cpu-demo" if kind == "cpu" else "full-zero2",
        options=chosen,
        model=model,
        gpu=gpu,
        model_source=f"presets/models/{model.name}.toml",
    )


def state_bytes(spec: RunSpec) -> dict[Component, int]:
    """Resident training state of one rank under ZeRO-2, and what a forward pass adds."""
    params = shape.param_count(spec.model)
    width = 4 if spec.on_cpu else 2
    tokens = spec.options.micro_batch * spec.options.seq_len
    return {
        Component.PARAMETERS: width * params,
        Component.GRADIENTS: width * params // spec.world_size,
        Component.OPTIMIZER_STATE: 8 * params // spec.world_size,
        Component.MASTER_PARAMETERS: 4 * params // spec.world_size,
        Component.ACTIVATIONS: tokens * spec.model.hidden_size * spec.model.num_layers * 27 * width // 2,
        Component.LOGITS: 12 * tokens * spec.model.vocab_size,
        Component.COMMUNICATION_BUFFERS: width * min(params, 500_000_000),
    }


def moment_bytes(spec: RunSpec, moment: Moment) -> dict[Component, int]:
    """Components of one rank that are live at a moment."""
    parts = state_bytes(spec)
    gone: tuple[Component, ...] = ()
    if moment in (Moment.OPTIMIZER_STEP, Moment.STEADY, Moment.INIT):
        gone = (Component.ACTIVATIONS, Component.LOGITS)
    elif moment is Moment.FIRST_BLOCK_BACKWARD:
        gone = (Component.LOGITS,)
    return {component: size for component, size in parts.items() if component not in gone}


def recorded_prediction(spec: RunSpec, *, runtime_bytes: int = 440 * MIB) -> Prediction:
    """A prediction a few percent away from what the recorded run will measure."""
    moments = []
    for moment in Moment:
        parts = {component: round(size * 1.03) for component, size in moment_bytes(spec, moment).items()}
        if spec.on_cpu:
            parts[Component.RUNTIME] = runtime_bytes
        moments.append(MomentBytes(name=moment, components=parts, total_bytes=sum(parts.values())))
    largest = max(moments, key=lambda m: m.total_bytes)
    peak, capacity = largest.total_bytes, spec.gpu.memory_bytes
    params = shape.param_count(spec.model)
    return Prediction(
        params=params,
        trainable_params=params,
        fits=True,
        peak_allocated_bytes=peak,
        peak_allocated_upper_bytes=round(peak * 1.1),
        peak_reserved_bytes=(peak, round(peak * 1.12)),
        peak_device_bytes=None if spec.on_cpu else round(peak * 1.06) + 2 * GIB,
        host_bytes=peak * spec.world_size if spec.on_cpu else 12 * GIB,
        pinned_bytes=0,
        nvme_bytes=0,
        step_seconds=0.4,
        tokens_per_second=spec.tokens_per_step / 0.4,
        moments=tuple(moments),
        peak_moment=largest.name,
        host=HostBytes(
            total_bytes=peak * spec.world_size if spec.on_cpu else 12 * GIB,
            pinned_bytes=0,
            nvme_bytes=0,
            components={},
        ),
        needed_bytes=round(peak * 1.1) * (spec.world_size if spec.on_cpu else 1),
        device_memory_bytes=capacity,
        assumptions=("a hand-made prediction for tests",),
    )

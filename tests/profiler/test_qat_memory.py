"""What fake quantization keeps and makes, against torchao's own code in the families' modelling code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from llmtop.presets import catalog
from llmtop.presets.hf.canonical import canonical
from llmtop.presets.hf.config import read_shape
from llmtop.presets.spec import GpuSpec, RunOptions, RunSpec
from llmtop.profiler.memory.backward import _block_alive
from llmtop.profiler.memory.blocks import block_bytes
from llmtop.profiler.memory.predict import predict, predict_closely
from llmtop.profiler.memory.qat import qat_scales
from llmtop.profiler.memory.result import Component, Moment
from llmtop.profiler.memory.sizes import sizes_of
from llmtop.profiler.memory.states import state_bytes
from llmtop.profiler.memory.waiting import kept_bytes as waiting_bytes
from llmtop.profiler.memory.walk import walk_of
from llmtop.profiler.probes import trace_model
from llmtop.profiler.probes.trace_model import trace
from llmtop.profiler.probes.trace_sizes import blocks_of
from llmtop.trainer.worker.qat import prepare
from tests.profiler.live_bytes import block_backward_bytes
from tests.profiler.test_activations_real import BATCH, LENGTH, build, kept_bytes, run_spec
from tests.profiler.test_memory_cpu import spec_of
from tests.profiler.test_trace_model import KNOWN
from tests.profiler.test_trace_model import spec_of as spec_of_traced

torchao = pytest.importorskip("torchao", reason="the extra `qat` is not installed")

GROUP = 16
CASES = [
    *((family, "int8-int4", "bf16", "sdpa") for family in ("llama", "gpt_neox", "phi3", "opt", "olmo2")),
    *((family, "int8-int4", "fp32", "sdpa") for family in ("gemma", "qwen3", "starcoder2", "cohere")),
    ("llama", "int8-int4", "bf16", "eager"),
    ("llama", "int4-weight-only", "bf16", "sdpa"),
    ("phi3", "int4-weight-only", "fp32", "eager"),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors of this size are shared out among threads at several times what they take alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("family", "kind", "precision", "attention"), CASES)
def test_a_block_keeps_what_the_formula_says(family: str, kind: Any, precision: str, attention: str) -> None:
    measured = []
    for layers in (2, 3):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        config, model = build(family, layers, attention, dtype)
        prepare(model, kind, GROUP)
        measured.append(kept_bytes(model))
    spec = run_spec(config, family, attention, precision, qat=kind, qat_group=GROUP)
    block = block_bytes(spec, sizes_of(spec))
    predicted = block.saved * BATCH * LENGTH + block.saved_weights
    assert predicted == pytest.approx(measured[1] - measured[0], rel=0.005)


@pytest.mark.parametrize("kind", ["int4-weight-only", "int8-int4"])
def test_a_traced_model_has_its_copies_too(kind: str) -> None:
    config = canonical(KNOWN["llama"], "llama")
    counted, traced = read_shape(config, "llama", "llama"), trace(config)
    by_formula, by_trace = (
        block_bytes(spec, sizes_of(spec))
        for spec in (spec_of_traced(one, config, qat=kind, seq_len=256) for one in (counted, traced))
    )
    assert by_trace.saved_weights == by_formula.saved_weights > 0
    assert by_trace.saved == pytest.approx(by_formula.saved, rel=0.01)


BLOCKS = 3
ROWS = 2


@pytest.mark.parametrize("length", [64, 2048])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama-3.2-1b", "int4-weight-only"),
        ("llama-3.2-1b", "int8-int4"),
        ("qwen3-0.6b", "int8-int4"),
        ("pythia-1b", "int4-weight-only"),
        ("phi-4", "int4-weight-only"),
        ("olmo-2-7b", "int8-int4"),
    ],
)
def test_a_blocks_backward_needs_what_the_formulas_say(name: str, kind: Any, length: int) -> None:
    loaded = catalog.load_model(name)
    with trace_model._as_on_a_gpu():
        model = trace_model._model(trace_model._configured(loaded.hf_config), "sdpa")
        blocks = blocks_of(model)
        del blocks[BLOCKS:]
        prepare(model, kind, 32)
        ids = torch.zeros(ROWS, length, dtype=torch.long, device="meta")
        followed = block_backward_bytes(model, blocks[-1], ids)
    spec = _spec(
        replace(loaded.shape, num_layers=BLOCKS),
        loaded.hf_config,
        micro_batch=ROWS,
        seq_len=length,
        qat=kind,
    )
    sizes = sizes_of(spec)
    walk = walk_of(spec, sizes, state_bytes(spec, sizes))
    begun = waiting_bytes(walk, BLOCKS) + walk.constant + walk.mask + walk.block.gradient * sizes.tokens
    assert _block_alive(walk, BLOCKS - 1).total - begun == pytest.approx(followed, rel=0.03)


def _spec(shape: Any, hf_config: dict[str, Any], **options: Any) -> RunSpec:
    return RunSpec(
        name="test",
        model=shape,
        gpu=GpuSpec(name="h200", compute_capability="9.0", memory_bytes=150 << 30),
        model_source="",
        hf_config=hf_config,
        options=RunOptions(**{"model": "x", "gpu": "h200", **options}),
    )


@pytest.mark.parametrize(
    ("options", "measured_mib"),
    [
        ({"qat": "int4-weight-only"}, 1070.3),
        ({"qat": "int8-int4"}, 1157.9),
        ({"qat": "int8-int4", "gradient_checkpointing": True}, 1032.8),
        ({"qat": "int8-int4", "zero": 0, "gpus": 2}, 1069.9),
    ],
    ids=str,
)
def test_recorded_ranks_are_predicted_within_two_percent(options: Any, measured_mib: float) -> None:
    """As in test_memory_cpu, one rank at ZeRO-2; torchao 0.18. Without rounding it was 1019.0 MiB."""
    prediction = predict(spec_of({"zero": 2, "gpus": 1, **options}))
    assert prediction.peak_allocated_bytes / (1 << 20) == pytest.approx(measured_mib, rel=0.02)


def test_scales_are_those_that_the_modules_hold() -> None:
    config, model = build("llama", 2, "sdpa", torch.bfloat16)
    prepare(model, "int4-weight-only", GROUP)
    model(input_ids=torch.zeros(1, 8, dtype=torch.long))
    rounding = [module.weight_fake_quantizer for module in model.modules() if _rounds(module)]
    held = sum(one.scale.nbytes + one.zero_point.nbytes for one in rounding)
    spec = run_spec(config, "llama", "sdpa", "bf16", qat="int4-weight-only", qat_group=GROUP)
    assert qat_scales(replace(spec, model=replace(spec.model, num_layers=2)), 2) == held


def _rounds(module: Any) -> bool:
    return type(module).__name__ == "FakeQuantizedLinear"


def test_a_prediction_counts_the_copies_of_all_blocks() -> None:
    loaded = catalog.load_model("llama-3.2-1b")
    plain = predict(_spec(loaded.shape, loaded.hf_config))
    rounding = predict(_spec(loaded.shape, loaded.hf_config, qat="int4-weight-only"))
    matrices = 973_078_528
    """Of all 16 blocks: 2 x 2048 x 2048, 2 x 512 x 2048, 3 x 8192 x 2048 each."""
    at = {
        one.name: one.components[Component.ACTIVATIONS]
        for one in rounding.moments
        if Component.ACTIVATIONS in one.components
    }
    before = {
        one.name: one.components[Component.ACTIVATIONS]
        for one in plain.moments
        if Component.ACTIVATIONS in one.components
    }
    copies = 2 * matrices * 2 + 2 * matrices // 32 * 2
    assert at[Moment.FORWARD_END] - before[Moment.FORWARD_END] == copies
    recomputed = predict(
        _spec(loaded.shape, loaded.hf_config, qat="int4-weight-only", gradient_checkpointing=True)
    )
    kept = next(one for one in recomputed.moments if one.name is Moment.FORWARD_END)
    assert kept.components[Component.ACTIVATIONS] < before[Moment.FORWARD_END], "no copies wait"
    assert "fake quantization" in " ".join(rounding.assumptions)
    # The allocator's tensors are not simulated: their order is not known.
    closely = predict_closely(_spec(loaded.shape, loaded.hf_config, qat="int4-weight-only"))
    assert closely.peak_reserved_bytes == rounding.peak_reserved_bytes

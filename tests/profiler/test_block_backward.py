"""What one block's backward needs on top of what was kept, against the real modelling code at full width."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from llmtop.presets import catalog
from llmtop.presets.spec import GpuSpec, RunOptions, RunSpec
from llmtop.profiler.memory.backward import _block_alive
from llmtop.profiler.memory.sizes import sizes_of
from llmtop.profiler.memory.states import state_bytes
from llmtop.profiler.memory.waiting import kept_bytes
from llmtop.profiler.memory.walk import walk_of
from llmtop.profiler.probes import trace_model
from llmtop.profiler.probes.trace_sizes import blocks_of
from tests.profiler.live_bytes import block_backward_bytes

BATCH, LENGTH, LAYERS = 2, 2048, 3
MODELS = (
    *("llama-3.2-1b", "qwen3-0.6b", "pythia-1b", "phi-4", "starcoder2-3b", "gemma-3-4b", "olmo-2-7b"),
    *("glm-4-9b", "granite-3.1-2b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b", "deepseek-v2-lite"),
)


@pytest.mark.parametrize("name", MODELS)
def test_a_blocks_backward_needs_what_the_formulas_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        trace_model._GroupedProduct, "backward", staticmethod(_product_backward), raising=False
    )
    loaded = catalog.load_model(name)
    with trace_model._as_on_a_gpu():
        model = trace_model._model(trace_model._configured(loaded.hf_config), "sdpa")
        blocks = blocks_of(model)
        del blocks[LAYERS:]
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
        followed = block_backward_bytes(model, blocks[-1], ids)
    shape = replace(loaded.shape, num_layers=LAYERS)
    assert _predicted(_spec(loaded, shape)) == pytest.approx(followed, rel=0.03)


def _product_backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows sorted by expert: a gradient as large as the rows, and one for all experts."""
    _, weight = context.saved_tensors
    return gradient @ weight[0].T, torch.empty_like(weight)


def _spec(loaded: catalog.LoadedModel, shape: Any) -> RunSpec:
    options = RunOptions(model="x", gpu="h200", micro_batch=BATCH, seq_len=LENGTH)
    return RunSpec(
        name="test",
        model=shape,
        gpu=GpuSpec(name="h200", compute_capability="9.0"),
        model_source="",
        hf_config=loaded.hf_config,
        options=options,
    )


def _predicted(spec: RunSpec) -> int:
    """Beyond what is kept and the gradient of the block's output."""
    sizes = sizes_of(spec)
    walk = walk_of(spec, sizes, state_bytes(spec, sizes))
    begun = kept_bytes(walk, LAYERS) + walk.constant + walk.mask + walk.block.gradient * sizes.tokens
    return _block_alive(walk, LAYERS - 1).total - begun

"""Scripts as people have them on a real GPU: steps, phases and memory are told of each kind."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from llmtop.profiler.memory.result import Component
from llmtop.profiler.record.events import MemoryClassified, StepFinished
from tests.script.watching import of, output, python, torchrun, watched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
STEPS, WIDTH, LAYERS, VOCAB, INTERMEDIATE = 6, 512, 6, 8192, 1536
# A block: queries and output, keys and values of half as many heads, the MLP's three, and its two norms.
PARAMS = 2 * VOCAB * WIDTH + WIDTH + LAYERS * (3 * WIDTH * WIDTH + 3 * WIDTH * INTERMEDIATE + 2 * WIDTH)
# A launcher of DeepSpeed's kind asks for the group's address, which torchrun gives.
KINDS = {
    "plain": python("gpu_kinds.py", "plain"),
    "trainer": python("gpu_kinds.py", "trainer"),
    "trainer, ZeRO-2": torchrun(1, "gpu_kinds.py", "trainer", "2"),
    "trainer, ZeRO-3": torchrun(1, "gpu_kinds.py", "trainer", "3"),
    "loop, ZeRO-1": torchrun(1, "gpu_kinds.py", "loop", "1"),
    "loop, ZeRO-3": torchrun(1, "gpu_kinds.py", "loop", "3"),
    "sft": python("gpu_kinds.py", "sft"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_on_a_gpu_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "sft" and importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed")
    monkeypatch.chdir(tmp_path)
    run, end, _ = watched(tmp_path, KINDS[kind])
    assert end.state == "completed", (end, output(run)[-3000:])
    steps = of(run, 0, StepFinished)
    # In plain torch the first one is where the optimizer is found.
    first = 1 if "ZeRO" in kind else 2
    assert [step.step for step in steps] == list(range(first, STEPS + 1))
    for step in steps[1:]:
        assert all(step.phase_seconds[phase] for phase in ("forward", "backward", "optimizer"))
    # Memory is not read in every step.
    read = [step.phase_memory["backward"].peak_bytes for step in steps if step.phase_memory]
    assert read and all((peak or 0) > 2 * PARAMS for peak in read)
    named = of(run, 0, MemoryClassified)
    assert named, output(run)[-3000:]
    assert named[-1].components[Component.PARAMETERS] == pytest.approx(2 * PARAMS, rel=0.001)

"""What the host does for a block of a Llama, in operations of autograd as `llmtop calibrate` times them.

    python -m benchmarks.host_operations
    python -m benchmarks.host_operations --gpu     # what a GPU's host takes, and each of Liger's kernels

On one thread of a CPU, with matrices too small to take time: what is left is Python, torch's dispatch, and
DeepSpeed's hooks. A block's share is a sixth of what eight blocks take beyond two. The step time of a GPU run
that waits for its host is predicted from it (`profiler/cost/steptime.py`, from BLOCK_OPERATIONS on).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.session import RESULTS, run_main
from llmtop.profiler.probes.calibrate import Clock, launch_seconds
from llmtop.trainer.supervisor.rankenv import free_port
from llmtop.trainer.worker.kernels import apply_liger

_LIGERS = ("rms_norm", "rms_norm,rope", "rms_norm,rope,glu")
"""One after another: a kernel that is switched on stays on in the process."""
_FEW, _MANY = 2, 8
_VOCAB, _LENGTH, _SECONDS = 64, 8, 0.5


def _model(layers: int, recompute: bool) -> Any:
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _step(layers: int, stage: int, recompute: bool, device: torch.device) -> Callable[[], None]:
    model = _model(layers, recompute)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        },
    )
    ids = torch.randint(0, _VOCAB, (1, _LENGTH), device=device)

    def act() -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return act


def _best(act: Callable[[], None], times: int) -> float:
    act()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began)
    return min(taken)


def _cells(device: torch.device) -> Iterator[tuple[int, bool, str]]:
    """ZeRO stage, recomputation, Liger's kernels; those that no kernel changes first."""
    yield from ((stage, recompute, "") for stage in (0, 1, 2, 3) for recompute in (False, True))
    if device.type == "cuda":
        yield from ((2, False, kernels) for kernels in _LIGERS)
        yield 2, True, _LIGERS[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=40, help="passes, of which the fastest counts")
    parser.add_argument("--gpu", action="store_true", help="on the GPU, waiting for it after each pass")
    parser.add_argument("--out", type=Path, default=RESULTS / "host_operations.jsonl")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if options.gpu else torch.device("cpu")
    torch.set_num_threads(1)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone, MASTER_PORT=str(free_port()), DS_ACCELERATOR=device.type)
    for stage, recompute, kernels in _cells(device):
        if kernels:
            apply_liger("llama", kernels, device)
        operation = launch_seconds(Clock(device, _SECONDS))
        times = options.times
        few, many = (_best(_step(layers, stage, recompute, device), times) for layers in (_FEW, _MANY))
        block = (many - few) / (_MANY - _FEW)
        row = {
            "device": torch.cuda.get_device_name(device) if options.gpu else "cpu",
            "zero": stage,
            "gradient_checkpointing": recompute,
            "liger_kernels": kernels,
            "block_seconds": block,
            "operation_seconds": operation,
            "operations": block / operation,
            "versions": {"torch": str(torch.__version__), "deepspeed": deepspeed.__version__},
        }
        with options.out.open("a") as log:
            log.write(json.dumps(row) + "\n")
        words = f"ZeRO-{stage} recompute {recompute!s:<6}{kernels:<20}"
        print(f"{words}{row['operations']:6.0f} operations", flush=True)


if __name__ == "__main__":
    run_main(main)

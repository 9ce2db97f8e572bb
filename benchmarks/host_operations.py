"""What the host does for a block of a Llama, in operations of autograd as `llmtop calibrate` times them.

    python -m benchmarks.host_operations

On one thread of a CPU, with matrices too small to take time: what is left is Python, torch's dispatch, and
DeepSpeed's hooks. A block's share is a sixth of what eight blocks take beyond two. The step time of a GPU run
that waits for its host is predicted from it (`profiler/cost/steptime.py`, from BLOCK_OPERATIONS on).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.session import RESULTS, run_main
from llmtop.profiler.probes.calibrate import Clock, launch_seconds
from llmtop.trainer.supervisor.rankenv import free_port

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


def _step(layers: int, stage: int, recompute: bool) -> Callable[[], None]:
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
    ids = torch.randint(0, _VOCAB, (1, _LENGTH))

    def act() -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    return act


def _best(act: Callable[[], None], times: int) -> float:
    act()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=40, help="passes, of which the fastest counts")
    parser.add_argument("--out", type=Path, default=RESULTS / "host_operations.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone, MASTER_PORT=str(free_port()), DS_ACCELERATOR="cpu")
    for stage in (0, 1, 2, 3):
        for recompute in (False, True):
            operation = launch_seconds(Clock(torch.device("cpu"), _SECONDS))
            few, many = (_best(_step(layers, stage, recompute), options.times) for layers in (_FEW, _MANY))
            block = (many - few) / (_MANY - _FEW)
            row = {
                "zero": stage,
                "gradient_checkpointing": recompute,
                "block_seconds": block,
                "operation_seconds": operation,
                "operations": block / operation,
                "versions": {"torch": str(torch.__version__), "deepspeed": deepspeed.__version__},
            }
            with options.out.open("a") as log:
                log.write(json.dumps(row) + "\n")
            print(f"ZeRO-{stage} recompute {recompute!s:<6}{row['operations']:6.0f} operations", flush=True)


if __name__ == "__main__":
    run_main(main)

"""One line that shows a script's DeepSpeed training in llmtop: `attach(engine)`.

`llmtop run -- COMMAND` calls it by itself when the engine is made; a script that does so too changes nothing.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from llmtop.profiler.probes.baseline import baseline
from llmtop.profiler.probes.script.engine import EngineWatch
from llmtop.profiler.probes.script.found import (
    found_model,
    hf_config,
    model_built,
    plain_json,
    unwrapped,
    vocab_size,
)
from llmtop.profiler.probes.script.steps import Steps
from llmtop.profiler.probes.script.watching import Watched, versions
from llmtop.profiler.probes.training import TrainingProbes
from llmtop.profiler.record.scriptevents import RankAttached

CLASSIFY_EVERY = 100
_ATTACHED = "_llmtop_attached"


def attach(engine: Any) -> bool:
    """Watch a DeepSpeed engine from here on; whether it is watched: not outside of a run.

    Each step then leaves its phases, its memory by component and its loss in the record of the run.
    """
    if getattr(engine, _ATTACHED, False):
        return True
    watched = Watched.here()
    if watched is None:
        return False
    watched.guarded(_attach, engine, watched)
    setattr(engine, _ATTACHED, not watched.off)
    return not watched.off


def _attach(engine: Any, watched: Watched) -> None:
    device = torch.device(engine.device)
    model = unwrapped(engine.module)
    inner = engine.basic_optimizer
    precision = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    watched.events.write(
        RankAttached(
            pid=os.getpid(),
            world_size=int(engine.world_size),
            framework="deepspeed",
            deepspeed=plain_json(engine._config._param_dict),
            hf_config=hf_config(model),
            found=found_model(model, inner, precision=precision),
        )
    )
    on_cpu = device.type == "cpu"
    local = int(os.environ.get("LOCAL_RANK") or 0)
    watched.events.write(baseline(local_rank=local, device_used_before_bytes=None, on_cpu=on_cpu))
    watched.events.write(model_built(model, inner, engine.optimizer, versions()))
    probes = TrainingProbes(
        engine,
        device=device,
        vocab_size=vocab_size(model),
        classify_every=CLASSIFY_EVERY,
        emit=watched.events.write,
    )
    watched.steps = Steps(probes, watched.events, device, world_size=int(engine.world_size))
    EngineWatch(engine, watched, watched.steps)

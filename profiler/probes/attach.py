"""One line that shows a script's DeepSpeed training in llmtop: `attach(engine)`.

`llmtop run -- COMMAND` calls it by itself when the engine is made; a script that does so too changes nothing.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from llmtop.profiler.probes.script import begin
from llmtop.profiler.probes.script.engine import EngineWatch
from llmtop.profiler.probes.script.found import found_model, hf_config, plain_json, unwrapped
from llmtop.profiler.probes.script.joining import join
from llmtop.profiler.probes.script.watching import Watched
from llmtop.profiler.record.scriptevents import RankAttached

_ATTACHED = "_llmtop_attached"


def watch() -> None:
    """From here on what trains in this process is watched: the first engine that DeepSpeed makes, or else the
    first torch optimizer that steps. Without `llmtop run`, all ranks must call it.
    """
    begin.wait_for_training()


def attach(engine: Any) -> bool:
    """Watch a DeepSpeed engine from here on; whether it is watched. To be called by all ranks.

    Each step then leaves its phases, memory by component and loss in the record of the run: of the one
    that launched this process, else of a new one, whose name is said on stderr.
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
    model = unwrapped(engine.module)
    precision = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    attached = RankAttached(
        pid=os.getpid(),
        world_size=int(engine.world_size),
        framework="deepspeed",
        deepspeed=plain_json(engine._config._param_dict),
        hf_config=hf_config(model),
        found=found_model(model, engine.basic_optimizer, precision=precision),
    )
    EngineWatch(engine, watched, join(watched, engine, model, attached, torch.device(engine.device)))

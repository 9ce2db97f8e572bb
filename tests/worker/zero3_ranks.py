"""One rank that trains a few layers at ZeRO-3 and counts what stays gathered: `RUNDIR PRECISION`.

Writes to RUNDIR/gatheredN.json, for each step, the gathered bytes that live at the end of the forward pass
and the most that lived at any module's entry; and what the traced peaks leave without a name. Beside the
first two the probes sample the step `SAMPLED`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import deepspeed
import torch

from llmtop.profiler.probes.training import TrainingProbes
from llmtop.profiler.record.events import AnyEvent, PeakClassified
from llmtop.trainer.pdeath import die_with_parent
from llmtop.trainer.worker.place import place_from_environment
from llmtop.trainer.worker.process_group import join_process_group, leave_process_group
from tests.worker.dispatch_tracer import DispatchTracer

WIDTH, VOCAB, LAYERS, STEPS, SAMPLED = 64, 80, 6, 6, 5
_SETTLE_SECONDS = 60.0
WIDTH_BYTES = {"fp32": 4, "bf16": 2}


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        loss: torch.Tensor = self.head(self.norm(hidden)).float().square().mean()
        return loss


class Gathered:
    """Storages of whole weights that were seen and still live.

    A weight that only a reference cycle holds has been let go: it is collected before each look, since when
    Python would do so by itself depends on how many objects the rank has made so far. So has one that
    nothing but gloo's threads still hold: a gather that is over lets go of its tensors a moment later.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._live: dict[int, int] = {}
        self._parameters = list(module.parameters())
        self.most = 0
        for part in module.modules():
            part.register_forward_pre_hook(self._look)
            part.register_full_backward_pre_hook(self._look)

    def _look(self, module: torch.nn.Module, *_: Any) -> None:
        self._settle()
        for parameter in module.parameters(recurse=False):
            storage = parameter.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._live:
                self._live[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, storage.data_ptr(), None)
        self.most = max(self.most, sum(self._live.values()))

    def now(self) -> int:
        self._settle()
        return sum(self._live.values())

    def _settle(self) -> None:
        """Wait until nothing lives but what the parameters hold. Raises RuntimeError where more stays."""
        gc.collect()
        held = {parameter.untyped_storage().data_ptr() for parameter in self._parameters}
        end = time.monotonic() + _SETTLE_SECONDS
        while kept := self._live.keys() - held:
            if time.monotonic() > end:
                raise RuntimeError(f"{len(kept)} whole weights live that no parameter holds")
            time.sleep(0.001)


def config(precision: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 3,
            "stage3_max_live_parameters": 2 * WIDTH * WIDTH,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": WIDTH * WIDTH,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": WIDTH * WIDTH,
        },
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "timers": {"throughput": {"enabled": False}},
    }


def main(folder: Path, precision: str) -> None:
    die_with_parent()
    place = place_from_environment()
    device = join_process_group(place, on_cpu=True)
    torch.manual_seed(0)
    ds_config = config(precision)
    with deepspeed.zero.Init(config_dict_or_path=ds_config):
        model = Layers()
    with DispatchTracer() as tracer:
        for parameter in list[Any](model.parameters()):
            tracer.adopt(parameter.ds_tensor)
        seen = train(model, device, ds_config, tracer)
    (folder / f"gathered{place.rank}.json").write_text(json.dumps(seen))
    leave_process_group(device)


def train(
    model: Layers, device: torch.device, ds_config: dict[str, Any], tracer: DispatchTracer
) -> dict[str, Any]:
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=ds_config, dist_init_required=False
    )
    peaks: list[AnyEvent] = []
    probes = TrainingProbes(
        engine,
        device=device,
        vocab_size=VOCAB,
        classify_every=SAMPLED,
        tracer=tracer,
        emit=peaks.append,
    )
    gathered = Gathered(model)
    gc.collect()
    gc.freeze()  # What lives until here is the libraries': later collections are quick.
    seen: list[tuple[int, int]] = []
    for step in range(1, STEPS + 1):
        gathered.most = 0
        probes.begin_step(step)
        ids = torch.randint(VOCAB, (2, 8))
        with probes.phase("forward", last=True):
            loss = engine(input_ids=ids)
        at_end = gathered.now()
        with probes.phase("backward", last=True):
            engine.backward(loss)
        with probes.phase("optimizer", last=True):
            engine.step()
        probes.finish_step()
        seen.append((at_end, gathered.most))
    traced = [event for event in peaks if isinstance(event, PeakClassified)]
    return {
        "gathered": seen,
        "peaks": [(event.step, event.phase, event.unnamed_bytes, event.total_bytes) for event in traced],
        "replay_errors": [event.replay_error_bytes for event in traced],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""Processes of the tests of `llmtop weights`: `train RUN ...`, `export JOBS`, `load PLAN`.

`train` is one rank: it trains runs one after the other and keeps, beside each, what its live engine has at
the end. `export` does jobs as the product's process does one; `load` is a user's program, without llmtop.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

TOKENS = torch.arange(48).view(2, 24) * 7 % 300


def train(folders: list[str]) -> None:
    import deepspeed

    from llmtop.profiler.record.eventlog import EventWriter
    from llmtop.profiler.record.rundir import RunDir
    from llmtop.trainer.pdeath import die_with_parent
    from llmtop.trainer.worker import session
    from llmtop.trainer.worker.place import place_from_environment
    from llmtop.trainer.worker.process_group import join_process_group, leave_process_group
    from llmtop.trainer.worker.stages import StageLog
    from llmtop.trainer.worker.stopping import StopRequest

    die_with_parent()
    runs = [RunDir.open(Path(folder)) for folder in folders]
    place = place_from_environment()
    for run in runs:
        session.import_libraries(run.spec())
    device = join_process_group(place, on_cpu=True)
    engines: list[Any] = []
    build = session.build_engine

    def build_and_keep(*arguments: Any) -> Any:
        engines[:] = [build(*arguments)]
        return engines[0]

    vars(session)["build_engine"] = build_and_keep
    for run in runs:
        with EventWriter(run.events_path(place.source), place.source) as events:
            session.train_in_group(run, place, device, events, StageLog(events), StopRequest())
        module = engines[0].module.eval()
        with torch.no_grad():
            logits = module(input_ids=TOKENS).logits
            with deepspeed.zero.GatheredParameters(list(module.parameters())):
                held = {name: one.detach().clone() for name, one in module.state_dict().items()}
        if place.rank == 0:
            torch.save({"weights": held, "logits": logits}, run.path / "live.pt")
    leave_process_group(device)


def export(path: str) -> None:
    import msgspec

    from llmtop.trainer.weightsjob import WeightsJob
    from llmtop.trainer.worker.weightsout.job import do_job

    told = {}
    for name, job in msgspec.json.decode(Path(path).read_bytes(), type=dict[str, WeightsJob]).items():
        Path(job.target).mkdir(parents=True)
        told[name] = do_job(job, lambda answer: None)
    Path(path).with_name("finished.json").write_bytes(msgspec.json.encode(told))


def plain_weights(model: Any) -> dict[str, torch.Tensor]:
    """Without packed ones, which are of classes of torchao's own."""
    return {name: one for name, one in model.state_dict().items() if type(one) is torch.Tensor}


def load(path: str) -> None:
    """Folders with or without a base under adapters: what Transformers and PEFT make of them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for name, place in json.loads(Path(path).read_text()).items():
        base = AutoModelForCausalLM.from_pretrained(place["base"] or place["folder"])
        model = PeftModel.from_pretrained(base, place["folder"]) if place["base"] else base
        model.eval()
        with torch.no_grad():
            told = {"logits": model(input_ids=TOKENS).logits, "weights": plain_weights(model)}
        told["tied"] = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        torch.save(told, Path(path).with_name(f"{name}.loaded.pt"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "train":
        train(sys.argv[2:])
    else:
        {"export": export, "load": load}[sys.argv[1]](sys.argv[2])

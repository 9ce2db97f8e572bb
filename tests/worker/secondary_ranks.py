"""One rank that trains a few layers at ZeRO-3 with second shards (ZeRO++ hpZ): `RUNDIR RANKS_OF_A_GROUP`.

Writes to RUNDIR/secondN.json the elements of its second shards, (trained, frozen), at moments of each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

from llmtop.trainer.pdeath import die_with_parent
from llmtop.trainer.worker.place import place_from_environment
from llmtop.trainer.worker.process_group import join_process_group, leave_process_group
from tests.worker.zero3_ranks import VOCAB, Layers, config

STEPS = 2


def second_shards(model: torch.nn.Module) -> tuple[int, int]:
    held = {True: 0, False: 0}
    for parameter in list[Any](model.parameters()):
        shard = parameter.ds_secondary_tensor
        held[parameter.requires_grad] += shard.numel() if shard is not None else 0
    return held[True], held[False]


def main(folder: Path, group: int) -> None:
    die_with_parent()
    place = place_from_environment()
    device = join_process_group(place, on_cpu=True)
    torch.manual_seed(0)
    ds_config = config("fp32")
    ds_config["zero_optimization"]["zero_hpz_partition_size"] = group
    with deepspeed.zero.Init(config_dict_or_path=ds_config):
        model = Layers()
    model.embedding.weight.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=trained, config=ds_config, dist_init_required=False
    )
    seen: list[tuple[str, int, int]] = [("init", *second_shards(model))]
    for _ in range(STEPS):
        loss = engine(input_ids=torch.randint(VOCAB, (2, 8)))
        seen.append(("forward", *second_shards(model)))
        engine.backward(loss)
        seen.append(("backward", *second_shards(model)))
        engine.step()
        seen.append(("step", *second_shards(model)))
    (folder / f"second{place.rank}.json").write_text(json.dumps(seen))
    leave_process_group(device)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""Plain torch in one process, without DeepSpeed: the losses that a run must have that was changed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from msgspec.structs import replace

from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.worker.build import build_model
from llmtop.trainer.worker.optimizer import schedule_factor
from llmtop.trainer.worker.place import Place
from llmtop.trainer.worker.session import make_batches


def plain_losses(run: RunDir, schedule: Mapping[int, int], steps: int) -> list[float]:
    """`schedule`: the first step with a setting to its number."""
    spec = run.spec(0)
    alone = replace(spec, options=replace(spec.options, zero=0, gpus=1))
    model = build_model(alone, {}, torch.device("cpu"))
    batches = make_batches(run, alone, Place(rank=0, local_rank=0, world_size=1, local_world_size=1))
    options = spec.options
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ],
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_epsilon,
    )
    losses = []
    for step in range(1, steps + 1):
        if step in schedule:
            spec = run.spec(schedule[step])
            if spec.options.seq_len != options.seq_len:
                batches.change_seq_len(spec.options.seq_len)
            options = spec.options
        batches.micro_batch = spec.global_batch
        factor = schedule_factor(
            step - 1, kind=options.lr_schedule, steps=options.steps, warmup_steps=options.warmup_steps
        )
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * factor
        ids = torch.from_numpy(batches.next_micro_batch())
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses

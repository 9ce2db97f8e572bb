"""Trains, saves and resumes tiny models under real DeepSpeed, one world after the other: `PLAN.json`.

The plan is a list of cases, each with a world size. Libraries are imported once; the ranks of a case are
forked from this process. A case writes `NAME.json` (losses, notes) and `NAME.pt` (the optimizer's state,
gathered by DeepSpeed's own functions, not by ours) into the plan's folder.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import numpy
import torch
import torch.distributed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.checkpointevents import CheckpointRefused, CheckpointSaved
from llmtop.trainer.pdeath import die_with_parent
from llmtop.trainer.statefile import Position, Progress, newest
from llmtop.trainer.supervisor.rankenv import free_port
from llmtop.trainer.worker import checkpoint
from llmtop.trainer.worker.build import DTYPES
from llmtop.trainer.worker.place import place_from_environment
from llmtop.trainer.worker.process_group import join_process_group, leave_process_group
from llmtop.trainer.worker.state import extras
from llmtop.trainer.worker.state.layout import StateRefused
from llmtop.trainer.worker.state.saving import random_of, shard_name
from llmtop.trainer.worker.state.shardfile import ShardReader

VOCAB, WIDTH, GLOBAL_ROWS, LENGTH = 61, 24, 8, 6
"""Odd, so that no border of a rank's part is one of a parameter."""
SAVED, LAST = 3, 6
IMPORTED_LATE = ("deepspeed.runtime.zero.muon.muon_optimizer", "peft", "bitsandbytes.optim")
"""What the first engine would take seconds for, in every rank."""
DIED = 9
"""Exit code of ranks that end in the middle of a save because the plan says so."""


class Tiny(torch.nn.Module):
    """Tied embedding and head, a frozen layer, a buffer that training changes, dropout, biases."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
        self.first = torch.nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.frozen = torch.nn.Linear(3 * WIDTH + 1, 3 * WIDTH + 1)
        self.second = torch.nn.Linear(3 * WIDTH + 1, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.dropout = dropout
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        seen: Any = self.seen
        if self.training:
            seen += 1
        hidden = torch.tanh(self.first(self.embedding(input_ids))) * (1 + 0.01 * seen[0])
        hidden = torch.nn.functional.dropout(torch.tanh(self.frozen(hidden)), self.dropout)
        logits = self.head(self.norm(self.second(hidden)))
        loss: torch.Tensor = torch.nn.functional.cross_entropy(
            logits.float().view(-1, VOCAB), input_ids.roll(1, 1).view(-1)
        )
        return loss


def rows(step: int, rank: int, ranks: int) -> torch.Tensor:
    made = numpy.random.default_rng(step).integers(0, VOCAB, (GLOBAL_ROWS, LENGTH))
    share = GLOBAL_ROWS // ranks
    return torch.from_numpy(made[rank * share : (rank + 1) * share])


def build(case: dict[str, Any], seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model: Any = Tiny(case.get("dropout", 0.0))
    if case.get("lora"):
        from peft import LoraConfig, get_peft_model

        # The base is made elsewhere; only adapters are part of the state.
        torch.manual_seed(5 if case.get("other_base") else 0)
        model = Tiny(case.get("dropout", 0.0))
        torch.manual_seed(seed)
        linear = ["first", "second"]
        adapters = LoraConfig(r=4, target_modules=linear, init_lora_weights=False, bias="lora_only")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    made: torch.nn.Module = model.to(DTYPES[case.get("precision", "bf16")])
    return made


def make_engine(case: dict[str, Any], seed: int) -> Any:
    model = build(case, seed)
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1, "lr": 2e-2},
        {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0, "lr": 1e-2},
    ]
    zero: dict[str, Any] = {"stage": case["zero"], "reduce_bucket_size": 4000}
    zero |= {"stage3_param_persistence_threshold": 80, "sub_group_size": case.get("sub_group_size", 10**9)}
    if case.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if case.get("offload_param"):
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_ROWS // torch.distributed.get_world_size(),
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": case.get("precision", "bf16") == "bf16"},
        "fp16": {"enabled": case.get("precision") == "fp16", "initial_scale_power": 8, "hysteresis": 1},
        "timers": {"throughput": {"enabled": False}},
    }
    if case.get("grad_accum_dtype"):
        config["data_types"] = {"grad_accum_dtype": case["grad_accum_dtype"]}
    if case.get("optimizer") == "deepspeed":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 2e-2, "betas": [0.8, 0.9]}}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups,
        optimizer=optimizer(case),
        lr_scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.9**step),
        config=config,
        dist_init_required=False,
    )
    return engine


def optimizer(case: dict[str, Any]) -> Any:
    kind = case.get("optimizer", "adamw")
    if kind == "deepspeed":
        return None
    if kind == "adamw":
        return lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.9))
    import bitsandbytes.optim as bnb

    made = bnb.PagedAdamW8bit if kind == "paged8" else bnb.AdamW8bit
    return lambda groups: made(groups, betas=(0.8, 0.9), min_8bit_size=1000)


def is_packed(case: dict[str, Any]) -> bool:
    """Its moments are codes, which DeepSpeed cannot tell by name."""
    return str(case.get("optimizer", "")).endswith("8")


def as_fused(case: dict[str, Any]) -> None:
    """Have DeepSpeed take torch's AdamW for its own fused one, which cannot be built on every machine."""
    from deepspeed.runtime import engine

    engine.FusedAdam = torch.optim.AdamW if case.get("fused") else FUSED


FUSED = deepspeed.ops.adam.FusedAdam


def state_of(engine: Any) -> dict[str, Any]:
    """Collective. Master weights and moments by name, through DeepSpeed where it shards them."""
    named = {name: one for name, one in engine.module.named_parameters() if one.requires_grad}
    wrapper, inner = engine.optimizer, engine.basic_optimizer
    if hasattr(wrapper, "_lazy_init_hp_params_optimizer_state"):
        # Until it is stepped once, DeepSpeed does not find its own states.
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()
    found: dict[str, Any] = {}
    for name, parameter in named.items():
        if engine.zero_optimization_stage() > 0:
            found[name] = [
                safe_get_full_fp32_param(parameter),
                safe_get_full_optimizer_state(parameter, "exp_avg"),
                safe_get_full_optimizer_state(parameter, "exp_avg_sq"),
            ]
        else:
            found[name] = whole(wrapper, inner, parameter)
    for name, three in found.items():
        found[name] = [one.detach().float().cpu().view(-1).clone() for one in three]
    frozen = [one for one in engine.module.parameters() if not one.requires_grad]
    with deepspeed.zero.GatheredParameters(frozen):
        found["frozen"] = [one.detach().float().cpu().clone() for one in frozen]
    kept = [one for name, one in engine.module.named_buffers() if "scratch" not in name]
    found["buffers"] = [one.float().cpu().clone() for one in kept]
    scaler = getattr(wrapper, "loss_scaler", getattr(wrapper, "loss_scale_config", None))
    found["scale"] = extras.loss_scale(scaler)
    found["steps"] = sorted({float(state["step"]) for state in inner.state.values() if state})
    if isinstance(inner, FUSED):
        # It counts for the last tensor of a group only.
        found["steps"] = found["steps"][-1:]
    found["groups"] = [
        [group["lr"], group["initial_lr"], tuple(group["betas"]), group["weight_decay"]]
        for group in inner.param_groups
    ]
    found["schedule"] = engine.lr_scheduler.state_dict()["last_epoch"]
    found["counts"] = [engine.global_steps, engine.global_samples]
    return found


def whole(wrapper: Any, inner: Any, parameter: Any) -> list[Any]:
    """At stage 0, where every rank has everything."""
    if wrapper is inner:
        return [parameter, inner.state[parameter]["exp_avg"], inner.state[parameter]["exp_avg_sq"]]
    for group, members in enumerate(wrapper.fp16_groups):
        at = 0
        for index, member in enumerate(members):
            if member is parameter and hasattr(wrapper, "fp32_groups"):
                master = wrapper.fp32_groups[group][index]
                return [master, inner.state[master]["exp_avg"], inner.state[master]["exp_avg_sq"]]
            if member is parameter:
                flat = wrapper.fp32_groups_flat[group]
                tensors = [flat, inner.state[flat]["exp_avg"], inner.state[flat]["exp_avg_sq"]]
                return [one[at : at + member.numel()] for one in tensors]
            at += member.numel()
    raise AssertionError("a parameter of no group")


def train(engine: Any, first: int, last: int, rank: int, ranks: int) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        loss = engine(input_ids=rows(step, rank, ranks).to(engine.device))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / ranks)
    return losses


def draws() -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [
        random.random(),
        float(numpy.random.rand()),
        float(torch.rand(())),
        float(torch.rand((), device=device)),
    ]


def run_case(case: dict[str, Any], folder: Path, rank: int, ranks: int) -> None:
    as_fused(case)
    only_trainable = bool(case.get("lora"))
    engine = make_engine(case, seed=0 if "loads" not in case else 1)
    told: dict[str, Any] = {"wrapper": type(engine.optimizer).__name__}
    for generator in (random.seed, numpy.random.seed, torch.manual_seed):
        generator(7 + rank if "loads" not in case else 99)
    state: dict[str, Any] | None = None
    if case.get("mishaps"):
        told |= mishaps(engine, case, folder, rank, ranks)
    elif "loads" in case:
        source = folder / f"{case['loads']}-checkpoints"
        progress = newest(source)
        assert progress is not None and progress.step == SAVED
        try:
            loaded = checkpoint.load(engine, source, progress, only_trainable=only_trainable)
        except LlmtopError as error:
            told["refused"] = str(error)
        else:
            told |= {"notes": loaded.notes, "bytes_read": loaded.bytes_read}
            told["draws"] = draws()
            checkpoint.load(engine, source, progress, only_trainable=only_trainable)
            state = None if is_packed(case) else state_of(engine)
            again = folder / f"{case['name']}-again"
            saved = checkpoint.save(engine, again, progress, only_trainable=only_trainable)
            assert isinstance(saved, CheckpointSaved), saved
            told["losses"] = train(engine, SAVED + 1, LAST, rank, ranks)
    else:
        told["losses"] = train(engine, 1, SAVED, rank, ranks)
        state = None if is_packed(case) else state_of(engine)
        progress = Progress(step=SAVED, position=Position(index=SAVED), world_size=ranks)
        target = folder / f"{case['name']}-checkpoints"
        saved = checkpoint.save(engine, target, progress, only_trainable=only_trainable)
        assert isinstance(saved, CheckpointSaved), saved
        told["size"] = saved.size_bytes
        told["draws"] = draws()
        progress = newest(target)
        assert progress is not None
        restore_draws(engine, target, progress)
        told["losses"] += train(engine, SAVED + 1, LAST, rank, ranks)
    (folder / f"{case['name']}-{rank}.json").write_text(json.dumps(told))
    if rank == 0 and state is not None:
        torch.save(state, folder / f"{case['name']}.pt")
    engine.destroy()


def mishaps(engine: Any, case: dict[str, Any], folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """Saves that are refused, a state that is written over another, and a rank that dies in the last save."""
    losses = train(engine, 1, SAVED, rank, ranks)
    target = folder / f"{case['name']}-checkpoints"
    progress = Progress(step=SAVED, position=Position(index=SAVED), world_size=ranks)
    later = Progress(step=SAVED + 1, position=Position(index=SAVED), world_size=ranks)

    def attempt(**planted: Any) -> str:
        real = {name: getattr(checkpoint, name) for name in planted}
        for name, stand_in in planted.items():
            setattr(checkpoint, name, stand_in)
        result = checkpoint.save(engine, target, later, only_trainable=False)
        for name, value in real.items():
            setattr(checkpoint, name, value)
        torch.distributed.barrier()
        names = sorted(path.name for path in target.glob("*"))
        found = newest(target)
        torch.distributed.barrier()
        assert names == [f"step-{SAVED}"], names
        assert found is not None and found.step == SAVED
        assert isinstance(result, CheckpointRefused)
        return result.why

    def full(*_: Any, **__: Any) -> None:
        if rank == ranks - 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    def narrow(*_: Any) -> str | None:
        return "there is no room" if rank == ranks - 1 else None

    def unknown(*_: Any, **__: Any) -> None:
        raise StateRefused("this cannot be saved", why="nobody knows how")

    if rank == 0:
        (target / ".step-99.partial").mkdir(parents=True)  # what a crash left
    for _ in range(2):
        saved = checkpoint.save(engine, target, progress, only_trainable=False, durable=False)
        assert isinstance(saved, CheckpointSaved)
    told = {
        "full": attempt(write_share=full),
        "narrow": attempt(why_no_room=narrow),
        "unknown": attempt(share_of=unknown),
        "losses": losses + train(engine, SAVED + 1, LAST, rank, ranks),
    }
    if rank == 0:
        checkpoint._describe = lambda *_, **__: os._exit(DIED)
    (folder / f"{case['name']}-{rank}.json").write_text(json.dumps(told))
    try:
        checkpoint.save(engine, target, later, only_trainable=False)
    except RuntimeError:
        os._exit(DIED)
    raise AssertionError("a save without rank 0 ended well")


def restore_draws(engine: Any, folder: Path, progress: Progress) -> None:
    """What the test itself drew must not show in what comes after."""
    reader = ShardReader(folder / f"step-{progress.step}" / shard_name(engine.global_rank))
    extras.restore_random(*random_of(reader), engine.device)
    reader.close()


def run_rank(case: dict[str, Any], folder: Path, rank: int, port: int) -> None:
    ranks = case["world"]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    join_process_group(place_from_environment(), on_cpu=True)
    run_case(case, folder, rank, ranks)
    torch.distributed.barrier()


def run_together(plan: Path) -> None:
    """As one rank on a GPU, which a forked process could not use: the cases of this world in their order."""
    die_with_parent()
    place = place_from_environment()
    device = join_process_group(place, on_cpu=False)
    for case in json.loads(plan.read_text()):
        if case["world"] == place.world_size:
            run_case(case, plan.parent, place.rank, place.world_size)
    leave_process_group(device)


def main(plan: Path) -> None:
    die_with_parent()
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    # Each case has ranks of its own: a stage-3 engine leaves behind its linear layer, which rounds otherwise.
    for case in json.loads(plan.read_text()):
        port = free_port()
        children = []
        for rank in range(case["world"]):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    die_with_parent()
                    run_rank(case, plan.parent, rank, port)
                    code = 0
                finally:
                    if code:
                        traceback.print_exc()
                    os._exit(code)
            children.append(child)
        expected = DIED if case.get("mishaps") else 0
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(code != expected for code in codes):
            sys.exit(f"the ranks of {case['name']} ended with {codes}")


if __name__ == "__main__":
    (run_together if "RANK" in os.environ else main)(Path(sys.argv[1]))

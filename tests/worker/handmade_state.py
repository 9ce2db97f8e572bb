"""A saved state of the tiny Llama written by hand, as two ranks of ZeRO-3 would: no engine, no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.statefile import (
    INDEX,
    MARKER,
    Piece,
    Position,
    Progress,
    Source,
    StateIndex,
    StoredFile,
    StoredParameter,
    StoredSlab,
)
from llmtop.trainer.worker.state.shardfile import write_shard
from tests.worker.launching import TINY_LLAMA, make_run, tiny_spec

RANKS = 2
STEP = 4


def llama_shapes(config: dict[str, Any] = TINY_LLAMA) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        block = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def saved_run(
    folder: Path, shapes: dict[str, tuple[int, ...]] | None = None, *, scale: float = 1.0, **options: Any
) -> RunDir:
    """A run of the tiny Llama, ended, with one checkpoint of what `shapes` says."""
    run = make_run(folder, tiny_spec(**{"tokenizer": "bytes", **options}))
    write_state(run.checkpoints_dir / f"step-{STEP}", shapes or llama_shapes(), scale=scale)
    return run


def write_state(
    folder: Path, shapes: dict[str, tuple[int, ...]], *, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """The weights that are in it: random numbers."""
    folder.mkdir(parents=True)
    drawn = torch.Generator().manual_seed(3)
    weights = {name: scale * torch.randn(shape, generator=drawn) for name, shape in shapes.items()}
    files = tuple(_write_rank(folder, rank, weights) for rank in range(RANKS))
    index = StateIndex(
        step=STEP,
        source=Source(zero=3, world_size=RANKS, engine_optimizer="by hand", optimizer="AdamW"),
        parameters=tuple(
            StoredParameter(name=name, shape=tuple(one.shape), dtype="F32", trainable=True, saved=True)
            for name, one in weights.items()
        ),
        files=files,
    )
    (folder / INDEX).write_bytes(msgspec.json.encode(index))
    write_marker(folder)
    return weights


def write_marker(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != MARKER}
    progress = Progress(step=STEP, position=Position(index=STEP), world_size=RANKS, files=sizes)
    (folder / MARKER).write_bytes(msgspec.json.encode(progress))


def _write_rank(folder: Path, rank: int, weights: dict[str, torch.Tensor]) -> StoredFile:
    tensors, slabs = {}, []
    for number, one in enumerate(weights.values()):
        size = -(-one.numel() // RANKS)
        first = min(rank * size, one.numel())
        part = one.view(-1)[first : first + size]
        key = f"{number:05d}"
        tensors[f"{key}.master"] = part
        slabs.append(
            StoredSlab(
                key=key,
                elements=part.numel(),
                pieces=(Piece(number, first, part.numel(), 0),),
                tensors={"master": "F32"},
                step=float(STEP),
            )
        )
    path = folder / f"rank-{rank:05d}.safetensors"
    write_shard(path, tensors, {}, durable=False)
    return StoredFile(name=path.name, size_bytes=path.stat().st_size, slabs=tuple(slabs))

"""Which tensor of a folder becomes which of a GGUF file, in what type and how changed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.spec import ModelShape
from llmtop.profiler.memory.loading import stored_bytes_of, written_gguf_bytes, written_kind
from llmtop.profiler.memory.lora import linear
from llmtop.profiler.units import counted
from llmtop.trainer.quantize.families import (
    Family,
    check_assumptions,
    expected,
    family_of,
    notes,
)
from llmtop.trainer.quantize.rope import Rope, read_rope
from llmtop.trainer.quantize.source import Source, SourceTensor

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LEFTOVER = re.compile(r"rotary_emb\.inv_freq$")
"""Tables that older code saved and nobody reads."""
_NAMED = 3
"""Tensors that an error names before it only counts them."""
_COMPARED_BYTES = 1 << 24


class Planned(Struct, frozen=True, kw_only=True):
    """One tensor of the file to be."""

    name: str
    """In GGUF."""
    shape: tuple[int, ...]
    kind: str
    """Its type there."""
    tensor: SourceTensor | None = None
    """Where its numbers come from; None: `values` are they."""
    values: tuple[float, ...] = ()
    heads: int = 0
    """Rows of so many heads change places; 0: they stay."""
    plus_one: bool = False

    @property
    def size_bytes(self) -> int:
        return stored_bytes_of(self.shape, self.kind)


class GgufPlan(Struct, frozen=True, kw_only=True):
    arch: str
    kind: str
    planned: tuple[Planned, ...]
    rope: Rope
    predicted_bytes: int
    """Of all tensors, by the model's shape alone."""
    notes: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Of all tensors, one by one."""
        return sum(planned.size_bytes for planned in self.planned)


def plan_gguf(source: Source, kind: str) -> GgufPlan:
    """Raises UsageError for a model that GGUF cannot hold, LlmtopError for tensors that are amiss."""
    where = str(source.folder / "config.json")
    family = family_of(source.shape, where)
    shape = replace(source.shape, tied_embeddings=source.shape.tied_embeddings and not _own_head(source))
    check_assumptions(source.config, shape, family, where)
    wanted = expected(shape, family)
    _check_tensors(source, wanted, family)
    rope = read_rope(source.config, shape, where)
    made = tuple(_rope_tensors(rope))
    return GgufPlan(
        arch=family.arch,
        kind=kind,
        planned=(*made, *_from_files(replace(source, shape=shape), wanted, family, kind)),
        rope=rope,
        predicted_bytes=written_gguf_bytes(shape, kind) + sum(planned.size_bytes for planned in made),
        notes=notes(shape),
    )


def _own_head(source: Source) -> bool:
    """Whether a head that the configuration ties to the embedding is in the files with other numbers."""
    head, embedding = source.tensors.get(_HEAD), source.tensors.get(_EMBEDDING)
    if not source.shape.tied_embeddings or head is None or embedding is None:
        return False
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return True
    with head.file.open("rb") as one, embedding.file.open("rb") as two:
        one.seek(head.start_byte)
        two.seek(embedding.start_byte)
        for left in range(head.size_bytes, 0, -_COMPARED_BYTES):
            size = min(left, _COMPARED_BYTES)
            if one.read(size) != two.read(size):
                return True
    return False


def _check_tensors(source: Source, wanted: dict[str, tuple[int, ...]], family: Family) -> None:
    there = source.tensors
    missing = [key for key in wanted if key not in there]
    if missing:
        raise LlmtopError(
            f"the weights in {source.folder} lack {counted(len(missing), 'tensor')}: {_some(missing)}",
            why="the model's configuration says that it has them",
            fix="copy or download the folder again",
        )
    tied = {_HEAD} if _HEAD not in wanted else set()
    more = [key for key in there if key not in wanted and key not in tied and not _LEFTOVER.search(key)]
    if more:
        raise LlmtopError(
            f"the weights in {source.folder} have {counted(len(more), 'tensor')} too many: {_some(more)}",
            why="no model of this configuration has them, and a file without them would be another model",
            fix="give the folder of the plain model; adapters are merged before",
        )
    other = [
        f"{key} {there[key].shape}, not {size}" for key, size in wanted.items() if there[key].shape != size
    ]
    if other:
        raise LlmtopError(
            f"the weights in {source.folder} have other shapes than config.json says: {_some(other)}",
            fix="use the model's own config.json",
        )
    for key in wanted:
        module, _, what = key.rpartition(".")
        if what == "bias" and not module.endswith(family.biased or ("\0",)):
            raise UsageError(
                f"{key} cannot be written to GGUF",
                why=f"llama.cpp reads no such bias for {family.arch}",
                fix="--to int8 or --to nf4 keeps it",
            )


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _from_files(
    source: Source, wanted: dict[str, tuple[int, ...]], family: Family, kind: str
) -> Iterator[Planned]:
    shape = source.shape
    output = _EMBEDDING if shape.tied_embeddings else _HEAD
    heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads}
    for key, name in zip(wanted, _gguf_names(family, shape.num_layers, wanted), strict=True):
        tensor = source.tensors[key]
        module = key.split(".")[-2]
        yield Planned(
            name=name,
            shape=tensor.shape,
            kind=written_kind(tensor.shape, kind, key == output),
            tensor=tensor,
            heads=heads.get(module, 0) if family.interleaved else 0,
            plus_one=family.plus_one and key.endswith("norm.weight"),
        )


def _gguf_names(family: Family, layers: int, keys: dict[str, tuple[int, ...]]) -> Iterator[str]:
    import gguf  # numpy comes with it

    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    names = gguf.get_tensor_name_map(arch, layers)
    for key in keys:
        # In families whose head is always the embedding, gguf has no name for one.
        name = names.get_name(key, (".weight", ".bias"))
        if name is None:
            raise ValueError(f"gguf {family.arch} has no name for {key}")
        yield name


def _rope_tensors(rope: Rope) -> Iterator[Planned]:
    for name, values in (
        ("rope_freqs.weight", rope.factors),
        ("rope_factors_long.weight", rope.long_factors),
        ("rope_factors_short.weight", rope.short_factors),
    ):
        if values:
            yield Planned(name=name, shape=(len(values),), kind="F32", values=values)


def matrices(shape: ModelShape) -> int:
    """How many bitsandbytes packs: those of the blocks, not embeddings, head or norms."""
    return sum(group.count for group in linear(shape))

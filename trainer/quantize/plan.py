"""Which tensor of a folder becomes which of a GGUF file, in what type and how changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

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
    check_rotary,
    family_of,
    known_family,
    notes,
)
from llmtop.trainer.quantize.layout import EMBEDDING, HEAD, SHARED_GATE, apart, expected, together
from llmtop.trainer.quantize.rope import Rope, read_rope
from llmtop.trainer.quantize.source import Source, SourceTensor

_LEFTOVER = re.compile(r"rotary_emb\.inv_freq$")
"""Tables that older code saved and nobody reads."""
_ROUTERS = ("gate", SHARED_GATE)
"""Modules that choose and weigh experts."""
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
    key: str = ""
    """Its name in the folder; of experts, which are many there, without their number."""
    tensors: tuple[SourceTensor, ...] = ()
    """Where its numbers come from, the experts of a block one after the other; none: `values` are they."""
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
    source = replace(source, tensors=apart(source.tensors, family))
    shape = _shape_of_files(source)
    check_assumptions(source.config, shape, family, where)
    wanted = expected(shape, family)
    _check_whole(source, wanted)
    _check_biases(source, wanted, family)
    rope = read_rope(source.config, shape, where)
    check_rotary(rope, family, where)
    made = tuple(_rope_tensors(rope))
    return GgufPlan(
        arch=family.arch,
        kind=kind,
        planned=(*made, *_from_files(replace(source, shape=shape), wanted, family, kind)),
        rope=rope,
        predicted_bytes=written_gguf_bytes(shape, kind) + sum(planned.size_bytes for planned in made),
        notes=notes(shape),
    )


def check_tensors(source: Source) -> None:
    """Raise LlmtopError for tensors that are missing, too many or of other shapes, where that is known.

    Of other families it is found out as transformers loads them.
    """
    family = known_family(source.shape)
    if family is not None:
        source = replace(source, tensors=apart(source.tensors, family))
        _check_whole(source, expected(_shape_of_files(source), family))


def _shape_of_files(source: Source) -> ModelShape:
    tied = source.shape.tied_embeddings and not _own_head(source)
    return replace(source.shape, tied_embeddings=tied)


def _own_head(source: Source) -> bool:
    """Whether a head that the configuration ties to the embedding is in the files with other numbers."""
    head, embedding = source.tensors.get(HEAD), source.tensors.get(EMBEDDING)
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


def _check_whole(source: Source, wanted: dict[str, tuple[int, ...]]) -> None:
    there = source.tensors
    missing = [key for key in wanted if key not in there]
    if missing:
        raise LlmtopError(
            f"the weights in {source.folder} lack {counted(len(missing), 'tensor')}: {_some(missing)}",
            why="the model's configuration says that it has them",
            fix="copy or download the folder again",
        )
    tied = {HEAD} if HEAD not in wanted else set()
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


def _check_biases(source: Source, wanted: dict[str, tuple[int, ...]], family: Family) -> None:
    for key in wanted:
        module, _, what = key.rpartition(".")
        if what == "bias" and not module.endswith((*family.biased, *_norms_with_bias(source.shape, family))):
            raise UsageError(
                f"{key} cannot be written to GGUF",
                why=f"llama.cpp reads no such bias for {family.arch}",
                fix="--to int8 or --to nf4 keeps it",
            )


def _norms_with_bias(shape: ModelShape, family: Family) -> tuple[str, ...]:
    return (*family.norms, family.final_norm) if shape.norm == "layer" else ()


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _from_files(
    source: Source, wanted: dict[str, tuple[int, ...]], family: Family, kind: str
) -> Iterator[Planned]:
    shape = source.shape
    output = EMBEDDING if shape.tied_embeddings else HEAD
    heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads}
    grouped: dict[str, list[SourceTensor]] = {}
    for key in wanted:
        grouped.setdefault(together(key), []).append(source.tensors[key])
    for (key, tensors), name in zip(
        grouped.items(), _gguf_names(family, shape.num_layers, grouped), strict=True
    ):
        size = tensors[0].shape if key in wanted else (len(tensors), *tensors[0].shape)
        module = key.split(".")[-2]
        if module == SHARED_GATE:
            # One row, which transformers reads as a vector alone; to llama.cpp the two are the same.
            size = size[1:]
        yield Planned(
            name=name,
            shape=size,
            kind=written_kind(size, kind, is_output=key == output, is_router=module in _ROUTERS),
            key=key,
            tensors=tuple(tensors),
            heads=heads.get(module, 0) if family.interleaved else 0,
            plus_one=family.plus_one and key.endswith("norm.weight"),
        )


def _gguf_names(family: Family, layers: int, keys: Iterable[str]) -> Iterator[str]:
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

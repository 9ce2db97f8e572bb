"""Whether a spec that was read from a file can be of a run: what is resolved here keeps to these bounds.

A record may come from anywhere, and views go through its layers, ranks and tensors one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from llmtop.presets.hf.reader import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, MAX_VOCABULARY, MAX_WIDTH
from llmtop.presets.ranks import MOST_RANKS
from llmtop.presets.spec import RunSpec

_MAX_COUNT = 10**12
"""Of options, as where they are typed."""
_LIMITS = {
    "num_layers": MAX_LAYERS,
    "vocab_size": MAX_VOCABULARY,
    "max_positions": MAX_POSITIONS,
    "learned_positions": MAX_POSITIONS,
    "sliding_window": MAX_POSITIONS,
    "num_experts": MAX_EXPERTS,
    "experts_per_token": MAX_EXPERTS,
    "first_dense_layers": MAX_LAYERS,
}
"""Of whole numbers of a model; the others are widths."""


def impossible(spec: RunSpec) -> str:
    """What the spec says that no run is, in words; empty where it may be one."""
    model = spec.model
    parts = [part for part in (model, model.moe, model.mla) if part is not None]
    far = (told for part in parts for told in _beyond(part, _LIMITS, MAX_WIDTH))
    problem = next(far, "") or next(_beyond(spec.options, {}, _MAX_COUNT), "")
    if problem or spec.world_size <= MOST_RANKS:
        return problem
    return f"it tells of {spec.world_size:,} ranks, and more than {MOST_RANKS:,} are nowhere"


def _beyond(part: Struct, limits: dict[str, int], otherwise: int) -> Iterator[str]:
    for name in part.__struct_fields__:
        value, most = getattr(part, name), limits.get(name, otherwise)
        if type(value) is int and not -1 <= value <= most:
            yield f"{name} = {value:,} is beyond {most:,}"

"""What about a run is not wrong and still likely not meant, in sentences: for a plan, which refuses little.

A plan may be for another machine, so that a file which is missing here is no error in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from llmtop.presets.no_effect import idle_keys
from llmtop.presets.paths import expand_user
from llmtop.presets.spec import RunSpec

MOST_GPUS_A_NODE = 8
"""What common machines have; a larger number is more often that of a whole cluster."""


def cautions(spec: RunSpec, *, launching: bool = False) -> tuple[str, ...]:
    """One sentence each; none for nearly every run. A launch refuses what is missing by itself."""
    return (*_positions(spec), *_nodes(spec), *_idle(spec), *(() if launching else _missing(spec)))


def _positions(spec: RunSpec) -> Iterator[str]:
    positions, asked = spec.model.max_positions, spec.options.seq_len
    if positions is not None and asked > positions:
        yield (
            f"{spec.model.name} was made for {positions:,} positions, and a sequence has {asked:,} tokens:"
            f" it trains, on positions that it has not seen; --seq-len {positions} stays within"
        )


def _nodes(spec: RunSpec) -> Iterator[str]:
    options = spec.options
    if spec.on_cpu or options.gpus <= MOST_GPUS_A_NODE:
        return
    nodes = -(-options.gpus // MOST_GPUS_A_NODE)
    spread = f"; over several it is --nodes {nodes} --gpus {options.gpus // nodes}"
    yield (
        f"{options.gpus} GPUs are taken to be in one node, linked as those of one machine"
        + (spread if options.gpus % nodes == 0 else "")
    )


def _idle(spec: RunSpec) -> Iterator[str]:
    for idle in idle_keys(spec.options.deepspeed, nodes=spec.options.nodes):
        yield f"deepspeed.{idle.path} has no effect here: {idle.why}; {idle.instead}"


def _missing(spec: RunSpec) -> Iterator[str]:
    options = spec.options
    paths = {"data": options.data, "tokenizer": options.tokenizer}
    if "nvme" in (options.offload_optimizer, options.offload_param):
        paths["nvme_path"] = options.nvme_path or ""
    for key, path in paths.items():
        named = path and path not in ("auto", "bytes") and not path.startswith("builtin:")
        # os.path answers for names that no file can have, where pathlib raises.
        if named and not os.path.exists(expand_user(path)):  # noqa: PTH110
            yield f"--{key.replace('_', '-')} {path} does not exist on this machine, so a run here is refused"

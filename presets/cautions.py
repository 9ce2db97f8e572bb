"""What about a run is not wrong and still likely not meant, in sentences: for a plan, which refuses little.

A plan may be for another machine, so that a file which is missing here is no error in it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from llmtop.presets.inputs import lacks_tokenizer
from llmtop.presets.no_effect import idle_keys
from llmtop.presets.paths import expand_user
from llmtop.presets.spec import RunSpec
from llmtop.presets.zero import zero_settings

_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
MOST_GPUS_A_NODE = 8
"""What common machines have; a larger number is more often that of a whole cluster."""


def cautions(spec: RunSpec, *, launching: bool = False) -> tuple[str, ...]:
    """One sentence each. A launch refuses what is missing by itself, and has to say when nothing is saved."""
    return (
        *_positions(spec),
        *_warm_up(spec),
        *_nodes(spec),
        *_idle(spec),
        *_own_head(spec),
        *(_unsaved(spec) if launching else _missing(spec)),
    )


def _unsaved(spec: RunSpec) -> Iterator[str]:
    if spec.saves_nothing:
        yield (
            "nothing is saved: checkpoint_every is 0 and save_at_end false; --save-at-end or"
            " --checkpoint-every N saves, and llmtop stop RUN --save while it runs"
        )


def _positions(spec: RunSpec) -> Iterator[str]:
    positions, asked = spec.model.max_positions, spec.options.seq_len
    if positions is not None and asked > positions:
        yield (
            f"{spec.model.name} was made for {positions:,} positions, and a sequence has {asked:,} tokens:"
            f" it trains, on positions that it has not seen; --seq-len {positions} stays within"
        )


def _warm_up(spec: RunSpec) -> Iterator[str]:
    options = spec.options
    if spec.script is None and options.warmup_steps >= options.steps:
        never = options.warmup_steps > options.steps
        reached = "never reaches its value" if never else "reaches its value only at the end"
        shorter = options.steps // 10
        does = "is a tenth of the run" if shorter else "leaves it out"
        yield (
            f"the warm-up takes {options.warmup_steps:,} steps and the run has {options.steps:,}:"
            f" the learning rate {reached}; --warmup-steps {shorter} {does}"
        )


def _nodes(spec: RunSpec) -> Iterator[str]:
    options = spec.options
    if options.nodes == 1 and options.inter_node_gbps is not None:
        yield "inter_node_gbps has no effect on one node: --nodes N says how many there are"
    zero = zero_settings(options.zero, options.deepspeed, spec.model.hidden_size)
    if spec.has_uneven_nodes and zero.hpz_partition_size > 1:
        yield (
            "second shards are kept in groups of ranks that follow each other, and some lie on two nodes,"
            " which have not as many GPUs: their gathers go over the network"
        )
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


def _own_head(spec: RunSpec) -> Iterator[str]:
    """Whether tied tensors that are both in the files are alike is known only when they are read."""
    if not spec.model.tied_embeddings or spec.weights_dir is None:
        return
    from llmtop.presets.tensorfile import BrokenWeights  # for a folder of weights alone
    from llmtop.presets.weightfiles import safetensors_files, stored_tensors

    try:
        stored = stored_tensors(safetensors_files(Path(spec.weights_dir)))
    except (OSError, BrokenWeights):
        return  # a launch refuses the folder with the reason; here it only cannot be said
    heads = [key for key in stored if key.endswith(_HEADS)]
    if heads and any(key.endswith(_EMBEDDINGS) for key in stored):
        yield (
            f"the weights hold {heads[0]} beside the embedding that config.json ties it to: where the two"
            f" differ both are trained, {math.prod(stored[heads[0]].shape):,} parameters more than counted"
        )


def _missing(spec: RunSpec) -> Iterator[str]:
    options = spec.options
    paths = {"data": options.data, "tokenizer": options.tokenizer}
    if lacks_tokenizer(spec):
        yield (
            f"{spec.weights_dir} has weights and no tokenizer, so a run here is refused: put its"
            " tokenizer.json into it, or --tokenizer FOLDER"
        )
    if "nvme" in (options.offload_optimizer, options.offload_param):
        paths["nvme_path"] = options.nvme_path or ""
    for key, path in paths.items():
        named = path and path not in ("auto", "bytes") and not path.startswith("builtin:")
        # os.path answers for names that no file can have, where pathlib raises.
        if named and not os.path.exists(expand_user(path)):  # noqa: PTH110
            yield f"--{key.replace('_', '-')} {path} does not exist on this machine, so a run here is refused"

"""What the model's code says of its tensors: names, ties, the form of its files. Nothing of it has memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.trainer.worker.build import DTYPES, model_config
from llmtop.trainer.worker.stream import skeleton_of
from llmtop.trainer.worker.weightsout.statetensors import Tensors, model_name
from llmtop.trainer.worker.weightsout.writing import Revert


def make_skeleton(spec: RunSpec) -> Any:
    """The model of the run without memory and without adapters."""
    from transformers import AutoModelForCausalLM

    config = model_config(spec)
    dtype = DTYPES[spec.options.precision]
    make = partial(AutoModelForCausalLM.from_config, config, dtype=dtype, trust_remote_code=False)
    return skeleton_of(make)


def named_once(skeleton: Any, given: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    """Values by all names of their tensor to values by the one name that files have it under."""
    tied = set(skeleton.all_tied_weights_keys)
    chosen = {}
    for names, value in given.items():
        plain = [model_name(name) for name in names]
        chosen[next((name for name in plain if name not in tied), plain[0])] = value
    return chosen


def check_whole(skeleton: Any, tensors: Tensors, aliases: set[str]) -> None:
    """Raise LlmtopError where the tensors are not those that the model's code asks for."""
    expected = {name: tuple(one.shape) for name, one in skeleton.state_dict().items()}
    missing = sorted(set(expected) - set(tensors) - aliases)
    strange = sorted(set(tensors) - set(expected))
    other = sorted(
        f"{name} {tensor.shape}, not {expected[name]}"
        for name, tensor in tensors.items()
        if name in expected and tensor.shape != expected[name]
    )
    for names, what in ((missing, "lacks"), (strange, "has, and the model has not,"), (other, "has another")):
        if names:
            raise LlmtopError(
                f"the saved state {what} {names[0]}",
                why=f"{len(names):,} of {len(expected):,} tensors do not agree; another Transformers"
                " may have trained it",
                fix="use the versions that the run was trained with; llmtop report tells them",
            )


def is_tied(skeleton: Any, aliases: set[str]) -> bool:
    """Whether every tensor that the configuration ties was one tensor in the run."""
    return all(target in aliases for target in skeleton.all_tied_weights_keys)


def form_of_files(skeleton: Any) -> Revert | None:
    """How this family's tensors become those of its files; None where they are the same."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if not get_model_conversion_mapping(skeleton, add_legacy=False):
        return None

    def revert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        reverted: dict[str, torch.Tensor] = revert_weight_conversion(skeleton, tensors)
        return reverted

    return revert

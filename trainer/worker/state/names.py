"""Names of a model's parameters and buffers, the same however the model is wrapped."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from msgspec import Struct

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Put into names by torch.compile and torch's checkpoint wrapper."""
SAMPLED_FROM_ELEMENTS = 4096
SAMPLE_ELEMENTS = 16


class Named(Struct, frozen=True, kw_only=True):
    """A parameter, once for all its names."""

    number: int
    name: str
    aliases: tuple[str, ...]
    parameter: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter: at ZeRO-3 it has its own on paper only."""
        return tuple(getattr(self.parameter, "ds_shape", self.parameter.shape))


def named_parameters(module: torch.nn.Module) -> list[Named]:
    """All parameters in the model's order; a tied weight has its first name, the others are aliases."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, Any] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(_plain(name))
        parameters[id(parameter)] = parameter
    return [
        Named(number=number, name=given[0], aliases=tuple(given[1:]), parameter=parameters[key])
        for number, (key, given) in enumerate(names.items())
    ]


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that torch counts as state; the others are made from the configuration."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name in part._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[_plain(f"{prefix}.{name}" if prefix else name)] = buffer
    return found


def frozen_check(named: list[Named]) -> str:
    """The form of the frozen weights and a checksum of the first elements of every large one.

    Empty where they cannot be looked at. Meaningful on rank 0 only, which has the beginning of each at any
    ZeRO stage.
    """
    total = 0
    forms: set[str] = set()
    for one in named:
        parameter = one.parameter
        if parameter.requires_grad or torch.Size(one.shape).numel() < SAMPLED_FROM_ELEMENTS:
            continue
        held = getattr(parameter, "ds_tensor", parameter).detach().view(-1)[:SAMPLE_ELEMENTS]
        if held.numel() < SAMPLE_ELEMENTS:
            # Its part lies in a file of the swapper.
            return ""
        sample = held.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        total = zlib.crc32(one.name.encode() + sample, total)
        packed = getattr(getattr(parameter, "quant_state", None), "quant_type", "")
        forms.add(packed or str(held.dtype).removeprefix("torch."))
    return f"{' and '.join(sorted(forms))}:{total:08x}" if forms else ""


def frozen(named: list[Named], trained: set[int]) -> Iterator[Named]:
    """Parameters that no optimizer updates, by their ids."""
    return (one for one in named if id(one.parameter) not in trained)


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name

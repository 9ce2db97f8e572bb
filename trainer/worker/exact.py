"""Keeps position tables exact while a model is made in ZeRO-3 shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def exact_arange() -> Iterator[None]:
    """Inside zero.Init `torch.arange` keeps the type that it is asked for; to be entered before it.

    DeepSpeed turns every floating tensor that a constructor gives into the model's type, and rotary
    frequencies come from `arange`: in 16 bits, positions far into a text run together. Newer releases
    of transformers do the same for themselves (5.24 `integrations/deepspeed.py`), 5.17 does not.
    """
    from deepspeed.runtime.zero import partition_parameters

    usual = partition_parameters.zero_wrapper_for_fp_tensor_constructor

    def wrapped(constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if constructor is not partition_parameters._orig_torch_arange:
            made: Callable[..., Any] = usual(constructor, *args, **kwargs)
            return made
        device = kwargs["target_device"] if "target_device" in kwargs else args[1]

        def arange(*bounds: Any, **chosen: Any) -> Any:
            if chosen.get("device") is None:
                chosen["device"] = device
            return constructor(*bounds, **chosen)

        return arange

    partition_parameters.zero_wrapper_for_fp_tensor_constructor = wrapped
    try:
        yield
    finally:
        partition_parameters.zero_wrapper_for_fp_tensor_constructor = usual

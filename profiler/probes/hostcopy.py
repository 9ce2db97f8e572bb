"""Numbers on their way from the device to the host, without waiting for them."""

from __future__ import annotations

import torch


def send_to_host(number: float | torch.Tensor | None) -> float | torch.Tensor | None:
    """A number on its way to the host; to be used after the next mark.

    To ask a tensor of the device for its value waits for all that is queued there, the next step included.
    """
    if not isinstance(number, torch.Tensor) or not number.is_cuda:
        return number
    host = torch.empty(number.shape, dtype=number.dtype, pin_memory=True)
    return host.copy_(number.detach(), non_blocking=True)

"""The dtype of products under ``torch.autocast``."""

from __future__ import annotations

import torch


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Convert the operands of products like ``torch.nn.functional.linear`` does."""
    place = tensors[0].device.type
    if not torch.is_autocast_enabled(place):
        return tensors
    dtype = torch.get_autocast_dtype(place)
    return tuple(each.to(dtype) for each in tensors)

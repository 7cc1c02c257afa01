"""Moving the batch axis of ``torch.func.vmap`` to the front."""

from __future__ import annotations

import torch


def in_front(
    value: torch.Tensor, dim: int | None, size: int, rank: int | None = None
) -> torch.Tensor:
    """Return ``value`` with the batch axis in front, added if it has none.

    size: of the batch axis. rank: number of axes after it; axes of size 1 are inserted
    there.
    """
    if dim is None:
        value = value.unsqueeze(0).expand(size, *value.shape)
    else:
        value = value.movedim(dim, 0)
    missing = 0 if rank is None else rank + 1 - value.dim()
    return value.reshape(size, *[1] * missing, *value.shape[1:])


def rank_of(value: torch.Tensor, dim: int | None) -> int:
    """Return the number of axes without the batch axis."""
    return value.dim() - (dim is not None)

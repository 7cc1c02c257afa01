"""Pooling of sequences, and rows of length 1."""

from __future__ import annotations

import torch
from torch.nn import functional

from inl.ops.pool import check_pooling
from inl.spec.kernel import Kernel
from inl_torch.eager.inl import upcast


def pool(x: torch.Tensor, starts: torch.Tensor, *, kind: str) -> torch.Tensor:
    check_pooling(kind)
    first, end = starts[:-1].long(), starts[1:].long()
    counts = (end - first)[:, None]
    if kind != "mean":
        at = (first if kind == "first" else end - 1).clamp(0, x.shape[0] - 1)
        return x.index_select(0, at).masked_fill(counts == 0, 0)
    index = torch.arange(x.shape[0], device=x.device)
    own = (index >= first[:, None]) & (index < end[:, None])
    wide = upcast(x)
    return (own.to(wide.dtype) @ wide / counts.clamp(min=1)).to(x.dtype)


def unit_rows(x: torch.Tensor) -> torch.Tensor:
    return functional.normalize(upcast(x), dim=-1).to(x.dtype)


KERNELS = (Kernel("pool", "eager", pool), Kernel("unit_rows", "eager", unit_rows))

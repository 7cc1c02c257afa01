"""Products of each head with a matrix of its own, and joined heads."""

from __future__ import annotations

import torch

from inl.ops.heads import HeadLinear
from inl.spec.kernel import Kernel


def head_linear(x: torch.Tensor, w: HeadLinear, *, transposed: bool) -> torch.Tensor:
    matrices = w.weight.view(x.shape[1], -1, w.weight.shape[-1])
    form = "thn,hnk->thk" if transposed else "thk,hnk->thn"
    return torch.einsum(form, x, matrices)


def join_lanes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a, b], -1)


KERNELS = (
    Kernel("head_linear", "eager", head_linear),
    Kernel("join_lanes", "eager", join_lanes, invariant=True),
)

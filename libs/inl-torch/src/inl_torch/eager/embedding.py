"""Token embedding and row gathering."""

from __future__ import annotations

import torch
from torch.nn import functional

from inl.ops.embedding import Embedding
from inl.spec.kernel import Kernel


def embedding(tokens: torch.Tensor, w: Embedding) -> torch.Tensor:
    return functional.embedding(tokens, w.weight)


def take_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, index)


KERNELS = (
    Kernel("embedding", "eager", embedding),
    Kernel("take_rows", "eager", take_rows, invariant=True),
    Kernel("zeros_like", "eager", torch.zeros_like, invariant=True),
)

"""Paged KV cache writes."""

from __future__ import annotations

import torch

from inl.spec.cache import Cache
from inl.spec.kernel import Kernel


def write_kv(
    k: torch.Tensor, v: torch.Tensor, cache: Cache, writes: torch.Tensor
) -> Cache:
    cells = writes.long()
    cache.k.flatten(0, 1).index_copy_(0, cells, k)
    cache.v.flatten(0, 1).index_copy_(0, cells, v)
    return cache


KERNELS = (Kernel("write_kv", "eager", write_kv),)

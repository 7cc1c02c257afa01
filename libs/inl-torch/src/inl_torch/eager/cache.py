"""Paged KV cache writes."""

from __future__ import annotations

import torch

from inl.dtypes import E4M3_LARGEST
from inl.spec.cache import Cache
from inl.spec.kernel import Kernel


def write_kv(
    k: torch.Tensor, v: torch.Tensor, cache: Cache, writes: torch.Tensor
) -> Cache:
    cells = writes.long()
    for index, (x, cached) in enumerate(((k, cache.k), (v, cache.v))):
        if cache.scales is not None:
            # Index operations have no kernels for float8.
            x, cached = to_float8(x, cache.scales[index]), cached.view(torch.uint8)
        cached.flatten(0, 1).index_copy_(0, cells, x)
    return cache


def to_float8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the bits of ``x / scale`` in float8, magnitudes to the largest number."""
    scaled = (x.float() / scale).clamp(-E4M3_LARGEST, E4M3_LARGEST)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


KERNELS = (Kernel("write_kv", "eager", write_kv),)

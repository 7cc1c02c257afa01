"""Root-mean-square and layer normalization."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

from inl.ops.norm import LayerNorm, Norm
from inl.spec.kernel import Kernel
from inl_torch.eager.inl import upcast


# Cached forever: captured graphs read from the address.
@cache
def _constant(value: float, place: torch.device) -> torch.Tensor:
    return torch.full((1,), value, dtype=torch.float32, device=place)


def rms_norm(x: torch.Tensor, w: Norm, *, eps: float) -> torch.Tensor:
    # Takes half the time of torch's rms_norm for one row, a tenth for many.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    mean = _constant(eps, x.device).addcmul(length, length, value=1 / x.shape[-1])
    y = torch.mul(x, mean.rsqrt_()).mul_(w.weight)
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def layer_norm(x: torch.Tensor, w: LayerNorm, *, eps: float) -> torch.Tensor:
    bias = None if w.bias is None else upcast(w.bias)
    weight = upcast(w.weight)
    return functional.layer_norm(upcast(x), weight.shape, weight, bias, eps).to(x.dtype)


KERNELS = (
    Kernel("layer_norm", "eager", layer_norm),
    Kernel("rms_norm", "eager", rms_norm),
)

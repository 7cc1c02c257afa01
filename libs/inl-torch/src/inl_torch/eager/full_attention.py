"""Attention within whole sequences, in both directions.

On the CPU sequences of the same length are one batch. On other devices, where reading
lengths would synchronize, every token attends to every other one, with a mask.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import torch
from torch.nn import functional

from inl.ops.full_attention import DistanceBias
from inl.spec.kernel import Kernel
from inl_torch.eager.inl import upcast


def full_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, *,
    scale: float, window: int | None,
) -> torch.Tensor:  # fmt: skip
    return _attend(q, k, v, starts, scale, window, None)


def biased_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor,
    w: DistanceBias, *, scale: float,
) -> torch.Tensor:  # fmt: skip
    return _attend(q, k, v, starts, scale, None, w.weight)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor,
    scale: float, window: int | None, bias: Any,
) -> torch.Tensor:  # fmt: skip
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    if q.device.type != "cpu":
        return _all_tokens(q, k, v, starts, scale, window, bias)
    out, at = torch.zeros_like(q), 0
    bounds = pairwise(starts.tolist())
    for length, run in groupby(stop - start for start, stop in bounds):
        count = len(list(run))
        if length:
            own = slice(at, at + count * length)
            index = torch.arange(length)
            mask = _mask(index - index[:, None], window, bias)
            parts = [
                x[own].view(count, length, *x.shape[1:]).transpose(1, 2)
                for x in (q, k, v)
            ]
            mixed = _product(parts, mask, scale)
            out[own] = mixed.transpose(1, 2).flatten(0, 1)
        at += count * length
    return out


def _all_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor,
    scale: float, window: int | None, bias: Any,
) -> torch.Tensor:  # fmt: skip
    index = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), index, right=True)
    other = sequence != sequence[:, None]
    mask = _mask(index - index[:, None], window, bias)
    zeros = torch.zeros_like(other, dtype=torch.float32)
    mask = (zeros if mask is None else mask).masked_fill(other, _MASKED)
    parts = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out = _product(parts, mask, scale)[0].transpose(0, 1)
    return out.masked_fill((index >= starts[-1])[:, None, None], 0)


_MASKED = torch.finfo(torch.float32).min / 2


def _mask(distance: torch.Tensor, window: int | None, bias: Any) -> Any:
    """Return what is added to the scores, [(heads,) tokens, keys], or ``None``."""
    if bias is not None:
        most = bias.shape[0] // 2
        return upcast(bias)[distance.clamp(-most, most) + most].permute(2, 0, 1)
    if window is None:
        return None
    zeros = torch.zeros_like(distance, dtype=torch.float32)
    return zeros.masked_fill_(distance.abs() > window, _MASKED)


def _product(parts: list[torch.Tensor], mask: Any, scale: float) -> torch.Tensor:
    """Compute attention of queries, keys and values [N, heads, tokens, d]."""
    q, k, v = map(upcast, parts)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.to(parts[0].dtype)


KERNELS = (
    Kernel("full_attention", "eager", full_attention),
    Kernel("biased_attention", "eager", biased_attention),
)

"""Causal attention in which spans attend to themselves in both directions."""

from __future__ import annotations

import torch

from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.eager.attention import _attend_dense, static_plan


def span_attention(
    q: torch.Tensor,
    cache: Cache,
    step: Step,
    spans: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
) -> torch.Tensor:
    """Every token attends to every key of all block tables, with a mask."""
    planned = static_plan(step, block_size=cache.k.shape[1])
    (span,) = planned.spans
    k_scale, v_scale = (None, None) if cache.scales is None else cache.scales
    k, v = span.gather(cache.k, group, k_scale), span.gather(cache.v, group, v_scale)
    tokens, heads, dim = q.shape
    index = torch.arange(span.rows * span.keys, device=q.device)
    row, place = index // span.keys, index % span.keys
    distance = step.positions[:, None] - place
    seen = (distance >= 0) | ((place >= spans[:, :1]) & (place < spans[:, 1:]))
    seen &= step.rows[:, None] == row
    if window is not None:
        seen &= distance < window
    wide = torch.float32
    bias = torch.zeros_like(seen, dtype=wide).masked_fill_(
        ~seen, torch.finfo(wide).min / 2
    )
    shared = heads // k.shape[2]
    k, v = (
        x.to(wide).flatten(0, 1).transpose(0, 1).repeat_interleave(shared, 0)
        for x in (k, v)
    )
    out = _attend_dense(q.to(wide).transpose(0, 1), k, v, bias, scale, cap)
    assert planned.unused is not None, "a static plan has it"
    result: torch.Tensor = out.transpose(0, 1).to(q.dtype).reshape(tokens, heads, dim)
    return result.masked_fill(planned.unused, 0)


KERNELS = (Kernel("span_attention", "eager", span_attention),)

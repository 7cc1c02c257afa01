"""Recurrent layers: the delta rule takes one token of each row after the other.

The number of tokens of the longest row is read on the CPU. Other devices repeat the
computation of one token as often as the step has tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inl.ops.recurrent import LENGTH_EPS, Decay, Taps
from inl.spec.kernel import Kernel
from inl.spec.step import Step


def _scan(
    out: torch.Tensor, table: torch.Tensor, step: Step, advance: Callable[..., Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply ``advance(tokens [R], states) -> (outputs, states)`` to each row's tokens.

    Returns the outputs, shaped as ``out``, and the table with the last states.
    """
    total, place = out.shape[0], out.device
    starts, slots = step.starts.long(), step.slots.long()
    used = torch.arange(slots.shape[0], device=place) < step.used_counts[1:2]
    counts = (starts[1:] - starts[:-1]) * used
    begins = starts[:-1].clamp(max=total - 1)
    fresh = (step.positions.index_select(0, begins) == 0) | ~used
    shape = -1, *(1,) * (table.ndim - 1)
    states = wide(table.index_select(0, slots)).masked_fill(fresh.view(shape), 0)
    results = out.new_zeros(total + 1, *out.shape[1:])  # the last is that of no token
    longest = int(counts.max()) if place.type == "cpu" else total
    for at in range(longest):
        live = counts > at
        tokens = (begins + at).clamp(max=total - 1)
        found, changed = advance(tokens, states)
        places = torch.where(live, tokens, total)
        results = results.index_copy(0, places, found.to(out.dtype))
        states = torch.where(live.view(shape), changed, states)
    table.index_copy_(0, slots, states.to(table.dtype))
    table[:1] = 0
    return results[:total], table


def wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def causal_conv(
    x: torch.Tensor, table: torch.Tensor, step: Step, w: Taps
) -> tuple[torch.Tensor, torch.Tensor]:
    total, taps, place = x.shape[0], w.weight.shape[-1], x.device
    starts, slots, rows = step.starts.long(), step.slots.long(), step.rows.long()
    used = torch.arange(slots.shape[0], device=place) < step.used_counts[1:2]
    begins = starts[:-1].clamp(max=total - 1)
    fresh = (step.positions.index_select(0, begins) == 0) | ~used
    before = wide(table.index_select(0, slots)).masked_fill(fresh.view(-1, 1, 1), 0)
    given, weights = wide(x), wide(w.weight)[:, 0].T

    def inputs(rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return inputs of rows, counted from the first one that the table has."""
        token = (starts[rows] + at - (taps - 1)).clamp(0, total - 1)
        stored = before[rows, at.clamp(max=taps - 2)]
        return torch.where((at < taps - 1).unsqueeze(-1), stored, given[token])

    tokens = torch.arange(total, device=place)
    places = tokens - starts[rows]
    out = sum(inputs(rows, places + tap) * weights[tap] for tap in range(taps))
    out = torch.where((tokens < step.used_counts[2:3])[:, None], out, 0)
    counts = (starts[1:] - starts[:-1]) * used
    last = counts[:, None] + torch.arange(taps - 1, device=place)
    every = torch.arange(slots.shape[0], device=place)[:, None].expand_as(last)
    table.index_copy_(0, slots, inputs(every, last).to(table.dtype))
    table[:1] = 0
    return out.to(x.dtype), table


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    table: torch.Tensor,
    step: Step,
    w: Decay,
    *,
    tiled: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    share = v.shape[1] // q.shape[1]
    q, k = (_unit(wide(each)) for each in (q, k))
    if tiled:
        q, k = (each.repeat(1, share, 1) for each in (q, k))
    else:
        q, k = (each.repeat_interleave(share, 1) for each in (q, k))
    q = q * q.shape[-1] ** -0.5
    rates = -wide(w.rate).exp() * softplus(wide(a) + wide(w.shift))
    keep, strength, values = rates.exp(), wide(b).sigmoid(), wide(v)

    def advance(
        tokens: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = k[tokens][:, :, None]
        states = states * keep[tokens][..., None, None]
        change = values[tokens][:, :, None] - key @ states
        change = change * strength[tokens][..., None, None]
        states = states + key.mT * change
        return (q[tokens][:, :, None] @ states)[:, :, 0], states

    return _scan(v, table, step, advance)


def softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)


KERNELS = (
    Kernel("causal_conv", "eager", causal_conv),
    Kernel("delta_rule", "eager", delta_rule),
)

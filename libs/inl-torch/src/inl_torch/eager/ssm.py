"""Scan of Mamba-2: products of chunks of tokens of all rows.

On the CPU, whose sizes are read without synchronization, a chunk has the rows that have
tokens left.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from inl.ops.ssm import Ssm, chunk_size
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.eager.recurrent import softplus, wide


class _Chunk(NamedTuple):
    """Inputs of a chunk of L tokens of R rows, zeros where a row has no token."""

    x: torch.Tensor
    """[R, groups, share, L, n]: values times their steps of time."""
    b: torch.Tensor
    """[R, groups, 1, L, d]."""
    c: torch.Tensor
    """As ``b``."""
    decays: torch.Tensor
    """[R, groups, share, L]: logarithms."""


def ssm_scan(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, dt: torch.Tensor,
    table: torch.Tensor, step: Step, w: Ssm,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    (total, heads, width), (groups, dim) = x.shape, b.shape[1:]
    rows, place = step.slots.shape[0], x.device
    shape = groups, heads // groups
    time = softplus(wide(dt) + wide(w.shift))
    decays = (-wide(w.rate).exp() * time).view(total, *shape)
    timed = (wide(x) * time[..., None]).view(total, *shape, width)
    keys, queries = wide(b)[:, :, None], wide(c)[:, :, None]
    starts, slots = step.starts.long(), step.slots.long()
    used = torch.arange(rows, device=place) < step.used_counts[1:2]
    counts = (starts[1:] - starts[:-1]) * used
    begins = starts[:-1].clamp(max=total - 1)
    fresh = (step.positions.index_select(0, begins) == 0) | ~used
    states = wide(table.index_select(0, slots)).masked_fill(fresh.view(-1, 1, 1, 1), 0)
    states = states.view(rows, *shape, dim, width)
    out = timed.new_zeros(total + 1, *shape, width)  # the last is that of no token
    host = place.type == "cpu"
    longest = int(counts.max()) if host else total
    size = chunk_size(longest, 1) if host else chunk_size(total, rows)
    order = torch.arange(size, device=place)
    for at in range(0, longest, size):
        live = (counts > at).nonzero()[:, 0] if host else slice(None)
        at_token = at + order
        inside = at_token < counts[live, None]
        tokens = (begins[live, None] + at_token).clamp(max=total - 1)
        given = (timed, keys, queries, decays)
        chunk = _Chunk(*(_read(each, tokens, inside) for each in given))
        found, changed = _advance(chunk, states[live])
        states[live] = changed
        places = torch.where(inside, tokens, total)
        out[places] = found.movedim(3, 1)
    results = out[:total].view(x.shape) + wide(x) * wide(w.skip)[:, None]
    table.index_copy_(0, slots, states.view(rows, heads, dim, width).to(table.dtype))
    table[:1] = 0
    return results.to(x.dtype), table


def _read(
    given: torch.Tensor, tokens: torch.Tensor, inside: torch.Tensor
) -> torch.Tensor:
    """Return tokens [R, L] of [T, groups, share, ...] by heads, zeros outside."""
    found = given[tokens].movedim(1, 3)
    mask = inside.view(-1, 1, 1, inside.shape[1], *(1,) * (found.ndim - 4))
    return found.masked_fill(~mask, 0)


def _advance(chunk: _Chunk, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of a chunk and the states [R, groups, share, d, n] after it.

    Decays between two tokens are sums of what is between them: differences of running
    sums lose the small ones behind a large one.
    """
    size = chunk.decays.shape[-1]
    between = chunk.decays[..., None].expand(*chunk.decays.shape, size).tril(-1)
    between = between.cumsum(-2)
    weights = (chunk.c @ chunk.b.mT) * between.exp().tril()
    running = chunk.decays.cumsum(-1)
    found = weights @ chunk.x + running.exp()[..., None] * (chunk.c @ states)
    last = between[..., -1, :].exp()[..., None]
    changed = states * running[..., -1:, None].exp() + chunk.b.mT @ (last * chunk.x)
    return found, changed


KERNELS = (Kernel("ssm_scan", "eager", ssm_scan),)

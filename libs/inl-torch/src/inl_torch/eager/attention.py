"""Causal attention over a paged cache.

On the CPU sizes are exact: leading rows of one token are one batch, padded to the
longest, and other rows go one by one. On a device, where sizes cannot be read without
waiting, every token meets every key that the tables can hold, behind a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, takewhile

import torch
from torch.nn import functional

from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Step

LABEL = "attention/eager"
"""Where a step keeps this kernel's plan."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens ``[start, stop)`` and the cached keys that they meet."""

    start: int
    stop: int
    batched: bool
    """Whether each token meets the keys of its own row only, else those of all rows."""
    rows: int
    keys: int
    """Keys of each row."""
    ids: torch.Tensor
    """[G, rows * blocks] blocks that hold the keys."""
    distance: torch.Tensor
    """[tokens, keys met] how far a key lies behind; negative where it is hidden."""
    causal: bool = False
    """Whether tokens and keys are one sequence from its first token on."""
    open: bool = False
    """Whether a token sees every key that it meets, where there is no window."""
    biases: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(
        default_factory=dict
    )
    """Scores' additions by window and dtype, made by the first layer that asks."""

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Zero where a key is seen; elsewhere huge, yet finite, and negative."""
        key = window, dtype
        if key not in self.biases:
            hidden = self.distance < 0
            if window is not None:
                hidden = hidden | (self.distance >= window)
            zeros = torch.zeros_like(self.distance, dtype=dtype)
            bias = zeros.masked_fill_(hidden, torch.finfo(dtype).min / 2)
            self.biases[key] = bias[:, None, None] if self.batched else bias
        return self.biases[key]

    def gather(self, cache: torch.Tensor, group: int) -> torch.Tensor:
        """Keys or values of the part's rows: [rows, keys, kv_heads, d]."""
        blocks = cache.index_select(0, self.ids[group])
        return blocks.view(self.rows, -1, *cache.shape[2:])[:, : self.keys]


@dataclass(frozen=True, slots=True)
class Plan:
    """What all layers share."""

    parts: tuple[Part, ...]
    unused: torch.Tensor | None = None
    """[T, 1, 1] whether a token is nobody's, where the parts hold padding too."""


def plan(step: Step, *, block_size: int) -> Plan:
    """Choose the form by where the step lies."""
    if step.positions.device.type == "cpu":
        return exact_plan(step, block_size=block_size)
    return static_plan(step, block_size=block_size)


def exact_plan(step: Step, *, block_size: int) -> Plan:
    """Read the sizes, and meet no more keys than there are."""
    starts, lengths = step.starts.tolist(), step.lengths.tolist()
    counts = [stop - start for start, stop in pairwise(starts)]
    singles = len(list(takewhile(lambda count: count == 1, counts)))
    parts = [_batch(step, lengths[:singles], block_size)] if singles else []
    for row, length in enumerate(lengths[singles:], start=singles):
        if counts[row]:
            span = starts[row], starts[row + 1]
            parts.append(_chunk(step, row, span, length, block_size))
    return Plan(tuple(parts))


def _batch(step: Step, lengths: list[int], block_size: int) -> Part:
    rows, longest = len(lengths), max(lengths)
    blocks = -(-longest // block_size)
    return Part(
        start=0,
        stop=rows,
        batched=True,
        rows=rows,
        keys=longest,
        ids=step.blocks[:, :rows, :blocks].flatten(1),
        distance=step.positions[:rows, None] - torch.arange(longest),
        open=min(lengths) == longest,
    )


def _chunk(
    step: Step, row: int, span: tuple[int, int], length: int, block_size: int
) -> Part:
    start, stop = span
    blocks = -(-length // block_size)
    return Part(
        start=start,
        stop=stop,
        batched=False,
        rows=1,
        keys=length,
        ids=step.blocks[:, row, :blocks],
        distance=step.positions[start:stop, None] - torch.arange(length),
        causal=stop - start == length,
        open=stop - start == 1,
    )


def static_plan(step: Step, *, block_size: int) -> Plan:
    """Meet every key of every row, whatever the sizes are."""
    tokens, rows = step.positions.shape[0], step.lengths.shape[0]
    keys = step.blocks.shape[2] * block_size
    place = step.positions.device
    met = torch.arange(rows * keys, device=place)
    distance = step.positions[:, None] - met % keys
    distance = distance.masked_fill_(step.rows[:, None] != met // keys, -1)
    unused = torch.arange(tokens, device=place) >= step.used_counts[2:]
    part = Part(
        start=0,
        stop=tokens,
        batched=tokens == rows == 1,
        rows=rows,
        keys=keys,
        ids=step.blocks.flatten(1),
        distance=distance,
    )
    return Plan((part,), unused[:, None, None])


def attention(
    q: torch.Tensor,
    cache: Cache,
    step: Step,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
) -> torch.Tensor:
    found: Plan = (
        step.plan[LABEL] if step.plan else plan(step, block_size=cache.k.shape[1])
    )
    outs = [
        _attend(q, cache, part, scale=scale, window=window, cap=cap, group=group)
        for part in found.parts
    ]
    done = found.parts[-1].stop if outs else 0
    if done < q.shape[0]:
        outs.append(q.new_zeros((q.shape[0] - done, *q.shape[1:])))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if found.unused is None else out.masked_fill(found.unused, 0)


def _attend(
    q: torch.Tensor,
    cache: Cache,
    part: Part,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
) -> torch.Tensor:
    k, v = part.gather(cache.k, group), part.gather(cache.v, group)
    tokens, heads, dim = part.stop - part.start, q.shape[1], q.shape[2]
    split = q[part.start : part.stop].view(tokens, k.shape[2], -1, dim)
    causal = part.causal and window is None and cap is None
    shown = causal or (part.open and window is None)
    bias = None if shown else part.bias(window, q.dtype)
    if part.batched:
        # The heads that share keys are queries of one head: no key is read twice.
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return _weigh(split, k, v, bias, scale, cap).reshape(tokens, heads, dim)
    split = split.permute(1, 2, 0, 3)
    k, v = (_per_head(x, split.shape[1]) for x in (k, v))
    out = _weigh(split, k, v, bias, scale, cap, causal=causal)
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, dim)


def _per_head(x: torch.Tensor, group: int) -> torch.Tensor:
    """[rows, keys, kv_heads, d] as [kv_heads, group, rows * keys, d], not copied."""
    met = x.flatten(0, 1).transpose(0, 1).unsqueeze(1)
    return met.expand(-1, group, -1, -1)


def _weigh(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    cap: float | None,
    *,
    causal: bool = False,
) -> torch.Tensor:
    if cap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=causal, scale=scale
        )
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


KERNELS = (Kernel("attention", "eager", attention, plan=plan),)

"""Causal attention over a paged cache.

On the CPU sizes are exact: the leading rows of one token are one batch, padded to the
longest row, and other rows are computed one by one. On other devices, where reading
sizes would synchronize, every token attends to every key that the block tables can
hold, with a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, takewhile

import torch
from torch.nn import functional

from inl.ops.sink_attention import Sinks
from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Step

LABEL, SINK_LABEL = "attention/eager", "sink_attention/eager"
"""Keys of these kernels' plans in ``Step.plan``."""


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Tokens ``[start, stop)`` and the cached keys to which they attend."""

    start: int
    stop: int
    batched: bool
    """Whether each token attends to the keys of its row only, not to all keys."""
    rows: int
    keys: int
    """Keys of each row."""
    ids: torch.Tensor
    """[G, rows * blocks] ids of the blocks with the keys."""
    distance: torch.Tensor
    """[tokens, keys] token's position minus key's position; negative if masked."""
    unwritten: torch.Tensor | None = None
    """[rows, keys] whether a cell is beyond its row's length. ``None``: no cell is."""
    causal: bool = False
    """Whether tokens and keys are the same whole sequence."""
    unmasked: bool = False
    """Whether no key is masked, unless there is a window."""
    biases: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(
        default_factory=dict
    )
    """Additive masks by window and dtype, made by the first layer that needs them."""

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask: 0 for visible keys, else minus infinity.

        A token that sees no key is padding: its result, NaN, is replaced.
        """
        key = window, dtype
        if key not in self.biases:
            masked = self.distance < 0
            if window is not None:
                masked = masked | (self.distance >= window)
            zeros = torch.zeros_like(self.distance, dtype=dtype)
            bias = zeros.masked_fill_(masked, -torch.inf)
            self.biases[key] = bias[:, None, None] if self.batched else bias
        return self.biases[key]

    def gather(
        self, cache: torch.Tensor, group: int, scale: torch.Tensor | None
    ) -> torch.Tensor:
        """Gather keys or values from the cache: [rows, keys, kv_heads, d].

        scale: of numbers in float8, which become float32.

        Unwritten cells, which may hold the NaN of an earlier request, are zero: a
        masked value still enters the weighted sum, with weight 0.
        """
        if scale is None:
            blocks = cache.index_select(0, self.ids[group])
        else:  # index operations have no kernels for float8
            bits = cache.view(torch.uint8).index_select(0, self.ids[group])
            blocks = bits.view(cache.dtype).float() * scale
        cells = blocks.view(self.rows, -1, *cache.shape[2:])[:, : self.keys]
        if self.unwritten is None:
            return cells
        return cells.masked_fill(self.unwritten[:, :, None, None], 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """Spans of a step, shared by all layers."""

    spans: tuple[AttentionSpan, ...]
    unused: torch.Tensor | None = None
    """[T, 1, 1] whether a token is padding, where the spans include padding."""


def plan(step: Step, *, block_size: int) -> Plan:
    """Plan with exact sizes on the CPU, with static shapes elsewhere."""
    if step.positions.device.type == "cpu":
        return exact_plan(step, block_size=block_size)
    return static_plan(step, block_size=block_size)


def exact_plan(step: Step, *, block_size: int) -> Plan:
    """Plan with sizes read from the step: no key is computed in vain."""
    starts, lengths = step.starts.tolist(), step.lengths.tolist()
    counts = [stop - start for start, stop in pairwise(starts)]
    singles = len(list(takewhile(lambda count: count == 1, counts)))
    spans = [_batch(step, lengths[:singles], block_size)] if singles else []
    for row, length in enumerate(lengths[singles:], start=singles):
        if counts[row]:
            bounds = starts[row], starts[row + 1]
            spans.append(_chunk(step, row, bounds, length, block_size))
    return Plan(tuple(spans))


def _batch(step: Step, lengths: list[int], block_size: int) -> AttentionSpan:
    rows, longest = len(lengths), max(lengths)
    blocks = -(-longest // block_size)
    keys_index, unmasked = torch.arange(longest), min(lengths) == longest
    unwritten = keys_index >= step.lengths[:rows, None]
    return AttentionSpan(
        start=0,
        stop=rows,
        batched=True,
        rows=rows,
        keys=longest,
        ids=step.blocks[:, :rows, :blocks].flatten(1),
        distance=step.positions[:rows, None] - keys_index,
        unwritten=None if unmasked else unwritten,
        unmasked=unmasked,
    )


def _chunk(
    step: Step, row: int, bounds: tuple[int, int], length: int, block_size: int
) -> AttentionSpan:
    start, stop = bounds
    blocks = -(-length // block_size)
    return AttentionSpan(
        start=start,
        stop=stop,
        batched=False,
        rows=1,
        keys=length,
        ids=step.blocks[:, row, :blocks],
        distance=step.positions[start:stop, None] - torch.arange(length),
        causal=stop - start == length,
        unmasked=stop - start == 1,
    )


def static_plan(step: Step, *, block_size: int) -> Plan:
    """Plan with static shapes: every token attends to every key of every row."""
    tokens, rows = step.positions.shape[0], step.lengths.shape[0]
    keys = step.blocks.shape[2] * block_size
    place = step.positions.device
    keys_index = torch.arange(rows * keys, device=place)
    distance = step.positions[:, None] - keys_index % keys
    distance = distance.masked_fill_(step.rows[:, None] != keys_index // keys, -1)
    unused = torch.arange(tokens, device=place) >= step.used_counts[2:]
    span = AttentionSpan(
        start=0,
        stop=tokens,
        batched=tokens == rows == 1,
        rows=rows,
        keys=keys,
        ids=step.blocks.flatten(1),
        distance=distance,
        unwritten=torch.arange(keys, device=place) >= step.lengths[:, None],
    )
    return Plan((span,), unused[:, None, None])


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
    planned = _plan_of(step, LABEL, cache)
    return _attend_spans(q, cache, planned, scale, window, cap, group)


def sink_attention(
    q: torch.Tensor,
    cache: Cache,
    step: Step,
    w: Sinks,
    *,
    scale: float,
    window: int | None,
    group: int,
) -> torch.Tensor:
    planned = _plan_of(step, SINK_LABEL, cache)
    return _attend_spans(q, cache, planned, scale, window, None, group, w.logits)


def _plan_of(step: Step, label: str, cache: Cache) -> Plan:
    found: Plan | None = step.plan[label] if step.plan else None
    return found or plan(step, block_size=cache.k.shape[1])


def _attend_spans(
    q: torch.Tensor,
    cache: Cache,
    planned: Plan,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention; sinks: [heads] logits without a key."""
    outs = [
        _attend(q, cache, span, scale, window, cap, group, sinks)
        for span in planned.spans
    ]
    done = planned.spans[-1].stop if outs else 0
    if done < q.shape[0]:
        outs.append(q.new_zeros((q.shape[0] - done, *q.shape[1:])))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if planned.unused is None else out.masked_fill(planned.unused, 0)


def _attend(
    q: torch.Tensor,
    cache: Cache,
    span: AttentionSpan,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    k_scale, v_scale = (None, None) if cache.scales is None else cache.scales
    k, v = span.gather(cache.k, group, k_scale), span.gather(cache.v, group, v_scale)
    stored, q = q.dtype, q.to(k.dtype)
    tokens, heads, dim = span.stop - span.start, q.shape[1], q.shape[2]
    split = q[span.start : span.stop].view(tokens, k.shape[2], -1, dim)
    causal = span.causal and window is None and cap is None and sinks is None
    no_bias = causal or (span.unmasked and window is None)
    bias = None if no_bias else span.bias(window, q.dtype)
    if span.batched:
        # Heads that share keys become queries of one head, so keys are read once.
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if sinks is not None:
            sinks = sinks.view(1, split.shape[1], -1, 1)
        out = _attend_dense(split, k, v, bias, scale, cap, sinks)
        return out.reshape(tokens, heads, dim).to(stored)
    split = split.permute(1, 2, 0, 3)
    k, v = (_per_head(x, split.shape[1]) for x in (k, v))
    if sinks is not None:
        sinks = sinks.view(*split.shape[:2], 1, 1)
    out = _attend_dense(split, k, v, bias, scale, cap, sinks, causal=causal)
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, dim).to(stored)


def _per_head(x: torch.Tensor, group: int) -> torch.Tensor:
    """View [rows, keys, kv_heads, d] as [kv_heads, group, rows * keys, d]."""
    keys_index = x.flatten(0, 1).transpose(0, 1).unsqueeze(1)
    return keys_index.expand(-1, group, -1, -1)


def _attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    cap: float | None,
    sinks: torch.Tensor | None = None,
    *,
    causal: bool = False,
) -> torch.Tensor:
    if cap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=causal, scale=scale
        )
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v.float()).to(q.dtype)


KERNELS = (
    Kernel("attention", "eager", attention, plan=plan),
    Kernel("sink_attention", "eager", sink_attention, plan=plan),
)

"""Sparse attention by an indexer: a choice of cached tokens, and attention over them.

On the CPU rows are computed one by one, with as many keys as they have. On other
devices, where reading sizes would synchronize, every token is compared with all keys
that the block tables can hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Step

MOST = 1 << 25
"""Numbers of an intermediate result of a part of the tokens, about."""
NONE = 1 << 30
"""Place of a token that is not chosen, after all others."""


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: Cache,
    step: Step,
    *,
    k: int,
    group: int,
) -> torch.Tensor:
    run = exact_topk if q.device.type == "cpu" else static_topk
    return run(q, weights, cache, step, k=k, group=group)


def exact_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: Cache,
    step: Step,
    *,
    k: int,
    group: int,
) -> torch.Tensor:
    """Choose from the keys that each row has; reads sizes."""
    ids = torch.full((q.shape[0], k), -1, dtype=torch.int32)
    starts, lengths = step.starts.tolist(), step.lengths.tolist()
    for row, (start, stop) in enumerate(pairwise(starts)):
        if stop > start:
            blocks = step.blocks[group, row, : -(-lengths[row] // cache.k.shape[1])]
            keys = _cells(cache, blocks, 0, q.shape[-1])[: lengths[row]]
            for part in _parts(start, stop, q.shape[1] * len(keys)):
                scores = _scores(q[part], weights[part], keys)
                ids[part] = chosen(scores, step.positions[part], k)
    return ids


def static_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: Cache,
    step: Step,
    *,
    k: int,
    group: int,
) -> torch.Tensor:
    """Choose from all keys that the block tables can hold."""
    table, positions = step.blocks[group], last_seen(step)
    tokens, rows = q.shape[0], table.shape[0]
    width = table.shape[1] * cache.k.shape[1]
    found = []
    for part in _parts(0, tokens, width * max(q.shape[1], q.shape[-1])):
        if tokens <= rows:
            blocks = table[step.rows[part]]
            keys = _cells(cache, blocks, 0, q.shape[-1])
            scores = _scores(q[part], weights[part], keys)
        else:
            scores = q.new_zeros((part.stop - part.start, width), dtype=torch.float32)
            for row in range(rows):
                keys = _cells(cache, table[row], 0, q.shape[-1])
                own = (step.rows[part] == row)[:, None]
                scores = torch.where(own, _scores(q[part], weights[part], keys), scores)
        found.append(chosen(scores, positions[part], k))
    return found[0] if len(found) == 1 else torch.cat(found)


def last_seen(step: Step) -> torch.Tensor:
    """Return the position of each token [T], -1 for padding."""
    tokens = torch.arange(step.tokens.shape[0], device=step.tokens.device)
    seen: torch.Tensor = step.positions.masked_fill(tokens >= step.used_counts[2:], -1)
    return seen


def _parts(start: int, stop: int, each: int) -> Iterator[slice]:
    """Divide tokens into parts, each token of ``each`` numbers."""
    size = max(1, MOST // max(each, 1))
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _cells(cache: Cache, blocks: torch.Tensor, which: int, lanes: int) -> torch.Tensor:
    """Return the first lanes of the cells of blocks [..., B]: [..., B * size, lanes].

    which: 0 for those of keys, 1 for values. Those of a cache in float8 are float32.
    """
    stored: torch.Tensor = (cache.k, cache.v)[which]
    if cache.scales is None:
        cells = stored[blocks.long(), :, 0, :lanes]
    else:  # index operations have no kernels for float8
        bits = stored.view(torch.uint8)[blocks.long(), :, 0, :lanes]
        cells = bits.view(stored.dtype).float() * cache.scales[which]
    return cells.flatten(-3, -2)


def _scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return scores [T, n] float32; keys: [n, d] of all tokens or [T, n, d] of each."""
    products = q.float() @ keys.float().transpose(-1, -2)
    return (weights.float()[:, None] @ products.relu_())[:, 0]


def chosen(scores: torch.Tensor, positions: torch.Tensor, k: int) -> torch.Tensor:
    """Return the places [T, k] of the ``k`` highest of the scores [T, n] in order.

    Those after ``positions`` [T] are left out; -1 stands for none.
    """
    width = scores.shape[1]
    places = torch.arange(width, device=scores.device)
    scores = scores.masked_fill(places > positions[:, None], -torch.inf)
    return highest(scores, k)


def highest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the places [T, k] of the ``k`` highest of the scores [T, n] in order.

    Those of minus infinity are left out; -1 stands for none.
    """
    best = scores.topk(min(k, scores.shape[1]), dim=-1, sorted=False)
    ids = best.indices.masked_fill(best.values == -torch.inf, NONE).to(torch.int32)
    ids = ids.sort(-1).values
    ids = ids.masked_fill(ids == NONE, -1)
    return torch.nn.functional.pad(ids, (0, k - ids.shape[1]), value=-1)


def sparse_attention(
    q: torch.Tensor,
    ids: torch.Tensor,
    cache: Cache,
    step: Step,
    *,
    scale: float,
    group: int,
) -> torch.Tensor:
    table, size = step.blocks[group].long(), cache.v.shape[1]
    used = torch.arange(q.shape[0], device=q.device) < step.used_counts[2:]
    outs = []
    for part in _parts(0, q.shape[0], ids.shape[1] * max(q.shape[1:])):
        picked = ids[part].long()
        valid = (picked >= 0) & used[part, None]
        picked = picked.masked_fill(~valid, 0)
        cells = table[step.rows[part].long()].gather(1, picked // size) * size
        latents = _latents(cache, cells + picked % size)
        # A cell that is not chosen may hold the NaN of an earlier request.
        latents = latents.masked_fill(~valid[..., None], 0)
        scores = q[part].float() @ latents.transpose(-1, -2) * scale
        scores = scores.masked_fill(~valid[:, None], torch.finfo(scores.dtype).min)
        out = scores.softmax(-1) @ latents
        outs.append(out.masked_fill(~valid.any(-1)[:, None, None], 0).to(q.dtype))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _latents(cache: Cache, cells: torch.Tensor) -> torch.Tensor:
    """Return the latents of cache positions [..., K]: [..., K, d] float32."""
    stored: torch.Tensor = cache.v.flatten(0, 2)
    if cache.scales is None:
        return stored[cells].float()
    scale: torch.Tensor = cache.scales[1]
    return stored.view(torch.uint8)[cells].view(stored.dtype).float() * scale


KERNELS = (
    Kernel("index_topk", "eager", index_topk),
    Kernel("sparse_attention", "eager", sparse_attention),
)

"""Rows of expert layers, from one token to many."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from inl.ops.moe import Experts
from kernels.rows import Row, x

GATHERED = 64
"""Most slots for which plain torch copies the matrices of each slot."""


def experts(tokens: int, count: int, k: int, hidden: int, inner: int) -> Row:
    slots = tokens * k

    def make() -> tuple[Any, ...]:
        chosen = torch.rand(tokens, count, device="cuda").topk(k).indices.int()
        weights = torch.rand(tokens, k, device="cuda").softmax(-1)
        w = Experts(
            x(count, inner, hidden, scale=hidden**-0.5),
            x(count, inner, hidden, scale=hidden**-0.5),
            x(count, hidden, inner, scale=inner**-0.5),
        )
        return x(tokens, hidden), chosen, weights, w

    def plain(a: Any, ids: Any, weights: Any, w: Experts) -> Any:
        if slots > GATHERED:
            return of_all(a, ids, weights, w)
        at = ids.flatten().long()
        each = a.repeat_interleave(k, 0)[:, :, None]
        inner = F.silu(w.gate[at] @ each) * (w.up[at] @ each)
        y = (w.down[at] @ inner).view(tokens, k, hidden)
        return (y.float() * weights[:, :, None]).sum(1).to(a.dtype)

    def of_all(a: Any, ids: Any, weights: Any, w: Experts) -> Any:
        """All experts for all tokens, which torch can capture."""
        share = weights.new_zeros(tokens, count).scatter_(1, ids.long(), weights)
        inner = F.silu(a @ w.gate.mT) * (a @ w.up.mT)
        y = inner @ w.down.mT
        return torch.einsum("eth,te->th", y.float(), share).to(a.dtype)

    def library(a: Any, ids: Any, _weights: Any, w: Experts) -> Any:
        """The three grouped products, of sorted rows."""
        chosen = ids.flatten()[:, None] == torch.arange(count, device=ids.device)
        ends = chosen.sum(0).cumsum(0).int()
        rows = a.repeat_interleave(k, 0)
        inner = F.grouped_mm(rows, w.gate.mT, offs=ends)
        F.grouped_mm(rows, w.up.mT, offs=ends)
        return F.grouped_mm(inner, w.down.mT, offs=ends)

    met = count * (1 - (1 - k / count) ** tokens)
    return Row(
        "experts", f"{tokens} rows, {k} of {count} of {inner}x{hidden}", make,
        lambda run, *args: run(*args, activation="silu"), plain, library,
        flops=6 * slots * hidden * inner, outputs=2 * tokens * hidden,
        read=int(6 * met * hidden * inner) + 2 * tokens * hidden,
    )  # fmt: skip


FINE, COARSE = (128, 8, 2048, 768), (8, 2, 4096, 14336)
"""Experts, experts per token, H and I, of Qwen3-30B-A3B and Mixtral 8x7B."""

ROWS = (
    *(experts(tokens, *FINE) for tokens in (1, 16, 256, 2048)),
    *(experts(tokens, *COARSE) for tokens in (1, 16, 256, 2048)),
)

"""Rows of expert layers, from one token to many."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from inl.ops.moe import Experts
from inl_torch.triton.moe.experts import PACKED_KERNELS
from inl_torch.triton.moe.packed import ExpertStack
from inl_torch.triton.quantized.packed import FLOAT8
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


def packed_experts(kind: str, tokens: int, count: int, k: int, hidden: int,
                   inner: int) -> Row:  # fmt: skip
    """Experts with packed weights, against plain torch with dequantized ones."""
    dense = experts(tokens, count, k, hidden, inner)
    (run,) = (each.run for each in PACKED_KERNELS if each.op == "experts")

    def stack(rows: int, columns: int) -> ExpertStack:
        shape = count, rows, columns
        if kind == "fp8":
            codes = x(*shape).to(FLOAT8)
            scales = 2.0 ** torch.randint(-7, -4, (*shape[:2], columns // 32),
                                          device="cuda")  # fmt: skip
            return ExpertStack(codes, scales.bfloat16())
        size = (*shape[:2], columns // 2)
        codes = torch.randint(0, 256, size, device="cuda", dtype=torch.uint8)
        size = (*shape[:2], columns // 32)
        if kind == "mxfp4":
            exponents = torch.randint(119, 122, size, device="cuda")
            return ExpertStack(codes, exponents.to(torch.uint8))
        scales = torch.rand(size, device="cuda").half() / 100
        return ExpertStack(codes, scales, -8 * scales)

    def make() -> tuple[Any, ...]:
        chosen = torch.rand(tokens, count, device="cuda").topk(k).indices.int()
        weights = torch.rand(tokens, k, device="cuda").softmax(-1)
        matrices = stack(inner, hidden), stack(inner, hidden), stack(hidden, inner)
        return x(tokens, hidden), chosen, weights, Experts(*matrices)

    def plain(a: Any, ids: Any, weights: Any, w: Experts) -> Any:
        unpacked = Experts(*(dequantized(matrix).to(a.dtype) for matrix in w))
        return dense.plain(a, ids, weights, unpacked)

    bits = {"fp8": 8.5, "mxfp4": 4.25}.get(kind, 5.0)
    met = count * (1 - (1 - k / count) ** tokens)
    return Row(
        "experts", f"{kind}, {tokens} rows, {k} of {count} of {inner}x{hidden}", make,
        lambda _, *args: run(*args, activation="silu"), plain, None,
        flops=dense.flops, outputs=2 * tokens * hidden,
        read=int(3 * bits / 8 * met * hidden * inner) + 2 * tokens * hidden,
    )  # fmt: skip


E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def dequantized(w: ExpertStack) -> torch.Tensor:
    """Weights [E, N, K] in float32, in plain torch."""
    codes, scales = w.codes, w.scales
    assert scales is not None, "rows have packed weights"
    if codes.dtype == torch.uint8:
        half = codes.view(*codes.shape[:2], -1, 16)
        codes = torch.cat((half & 15, half >> 4), -1).flatten(2)
    numbers = codes.float()
    if scales.dtype == torch.uint8:
        table = torch.tensor([*E2M1, *(-size for size in E2M1)], device=codes.device)
        numbers, scales = table[codes.long()], torch.exp2(scales.float() - 127)
    grouped = numbers.view(*scales.shape, -1) * scales.float()[..., None]
    if w.offsets is not None:
        grouped = grouped + w.offsets.float()[..., None]
    return grouped.flatten(2)


FINE, COARSE = (128, 8, 2048, 768), (8, 2, 4096, 14336)
"""Experts, experts per token, H and I, of Qwen3-30B-A3B and Mixtral 8x7B."""

ROWS = (
    *(experts(tokens, *FINE) for tokens in (1, 16, 256, 2048)),
    *(experts(tokens, *COARSE) for tokens in (1, 16, 256, 2048)),
    *(
        packed_experts(kind, tokens, *FINE)
        for kind in ("int4", "fp8", "mxfp4")
        for tokens in (1, 16, 256, 2048)
    ),
)

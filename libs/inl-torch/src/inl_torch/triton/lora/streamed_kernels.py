"""Triton kernels of a product of a few rows with adapters: ``A(x)``, then the product.

The first kernel waits for ``x`` before it lets the second start, so that the second may
read ``x`` and its matrices at once, and waits for ``A(x)`` only at its end.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.barrier import finish_stores
from inl_torch.triton.lora.kernels import load_chosen, load_selected, sum_split
from inl_torch.triton.matmul.activation import activate_gate
from inl_torch.triton.matmul.streamed import stream_sums
from inl_torch.triton.pdl import pdl_sync


@triton.jit
def adapted_inner(
    x: tensor, a0: tensor, a1: tensor, a2: tensor, selected: tensor, parts: tensor,
    inner: tensor, counters: tensor, x_stride: tensor, tokens: tensor, K: tl.constexpr,
    C: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, WAITS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Store ``selected * A(x)`` of each layer: ``inner`` [layers, tokens, C].

    Grid: tiles of columns of one layer after the other, splits of K. The last program
    of a tile to finish adds the splits in their order, and resets the counter to 0.
    parts: [splits, layers, tokens, C], scratch memory. WAITS: see ``finish_stores``.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    tiles: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    layer, layers = tile // tiles, tl.num_programs(0) // tiles
    token = tl.arange(0, TOKENS).to(tl.int64)
    column = (tile % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    chosen = load_chosen(selected, token, column, tokens, C)
    at = (layer * tokens + token)[:, None] * C + column[None, :]
    known = (token < tokens)[:, None] & (column < C)[None, :]
    if tl.max(tl.max(chosen.to(tl.int32), 0), 0) == 0:
        pdl_sync(PDL)
        if split == 0:
            tl.store(inner + at, tl.zeros(chosen.shape, tl.float32), mask=known)
        return
    a = a0
    if layer == 1:
        a = a1
    if layer == 2:
        a = a2
    acc = sum_split(x, a, chosen, token, column, x_stride, split * SPLIT, K, SPLIT,
                    STEP, True, PDL)  # fmt: skip
    size = layers * tokens * C
    tl.store(parts + split * size + at, acc, mask=chosen)
    finish_stores(WAITS)
    if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(counters + tile, 0)
        total = tl.zeros(chosen.shape, tl.float32)
        for each in tl.static_range(SPLITS):
            total += tl.load(parts + each * size + at, mask=chosen, other=0)
        tl.store(inner + at, total, mask=known)


@triton.jit
def adapted_product(
    x: tensor, weight: tensor, up: tensor, bias: tensor, y: tensor, b0: tensor,
    b1: tensor, b2: tensor, selected: tensor, inner: tensor, x_stride: tensor,
    tokens: tensor, n: tensor, k: tensor, n0: tensor, n1: tensor, C: tl.constexpr,
    LAYERS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, B_COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    SILU: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Store ``weight(x) + B(inner)``, or the activation of two such sums if ``GATED``.

    ``weight`` [n, k] stacks three layers of n0, n1 and the remaining outputs, unless
    ``LAYERS`` is 1 or ``GATED``. The previous kernel writes ``inner`` [layers, tokens,
    C] only, and has waited for ``x`` before this one starts.
    """
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS).to(tl.int64)
    b, layer, local, width = b0, tl.program_id(0) * 0, row, n
    if LAYERS == 3:
        width = n0
        if first >= n0:
            b, layer, local, width = b1, layer + 1, row - n0, n1
        if first >= n0 + n1:
            b, layer, local, width = b2, layer + 1, row - n0 - n1, n - n0 - n1
    column = tl.arange(0, B_COLUMNS)
    if C <= B_COLUMNS:
        # First used after the loop over inputs, whose loads do not wait for it.
        picks = load_selected(selected, token, column, tokens, C)
    acc, up_acc = stream_sums(
        x, weight, up, row, token, x_stride, tokens, n, k, ROWS, TOKENS, COLUMNS,
        STAGES, EVEN, GATED,
    )  # fmt: skip
    if C > B_COLUMNS:
        pdl_sync(PDL)
    for start in range(0, C, B_COLUMNS):
        if C > B_COLUMNS:
            column = start + tl.arange(0, B_COLUMNS)
            picks = load_selected(selected, token, column, tokens, C)
        chosen = picks.to(tl.float32) != 0
        present = tl.max(chosen.to(tl.int32), 0) != 0
        inside = (local < width)[:, None] & present[None, :]
        b_at = local.to(tl.int64)[:, None] * C + column[None, :]
        # Loaded before the loop over inputs, B would delay it.
        w = tl.load(b + b_at, mask=inside, other=0)
        if GATED:
            w_up = tl.load(b1 + b_at, mask=inside, other=0)
        if C <= B_COLUMNS:
            pdl_sync(PDL)
        if tl.max(present.to(tl.int32), 0) != 0:
            at = (layer * tokens + token)[None, :] * C + column[:, None]
            known = present[:, None] & (token < tokens)[None, :]
            part = tl.load(inner + at, mask=known, other=0)
            acc = tl.dot(w, part, acc, input_precision="ieee")
            if GATED:
                part = tl.load(inner + tokens * C + at, mask=known, other=0)
                up_acc = tl.dot(w_up, part, up_acc, input_precision="ieee")
    if GATED:
        acc = activate_gate(acc, up_acc, SILU)
    if HAS_BIAS:
        offset = tl.load(bias + row, mask=row < n, other=0).to(tl.float32)
        acc += offset[:, None]
    both = (token < tokens)[None, :] & (row < n)[:, None]
    tl.store(y + token[None, :] * n + row[:, None], acc, mask=both)

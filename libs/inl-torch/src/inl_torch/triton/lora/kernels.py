"""Triton kernels of adapters: ``A(x)`` of all layers of one input, then ``B``.

A tile of tokens reads the columns of the adapters that its tokens select, and no
others. With programmatic dependent launch the first kernel runs beside the linear layer
that precedes it: its input is older, so that it waits only at its end. The second loads
``selected`` and its matrices before it waits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.matmul.activation import activate_gate
from inl_torch.triton.pdl import pdl_start_next, pdl_sync, pdl_wait


@triton.jit
def load_selected(
    selected: tensor, token: tensor, column: tensor, tokens: tensor, C: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load ``selected`` of a tile, not 0 where a token selects a column."""
    known = (token < tokens)[:, None] & (column < C)[None, :]
    at = token[:, None] * C + column[None, :]
    return tl.load(selected + at, mask=known, other=0)


@triton.jit
def load_chosen(
    selected: tensor, token: tensor, column: tensor, tokens: tensor, C: tl.constexpr,
) -> tensor:  # fmt: skip
    """Whether each token selects each column."""
    return load_selected(selected, token, column, tokens, C).to(tl.float32) != 0


@triton.jit
def sum_split(
    x: tensor, a: tensor, chosen: tensor, token: tensor, column: tensor,
    x_stride: tensor, start: tensor, K: tl.constexpr, SPLIT: tl.constexpr,
    STEP: tl.constexpr,
) -> tensor:  # fmt: skip
    """``A(x)`` of the inputs from ``start``, where a token selects a column.

    Reads the rows of ``x`` and of ``a`` of the chosen places only.
    """
    k = start + tl.arange(0, STEP)
    rows = a + column.to(tl.int64)[None, :] * K
    present = (tl.max(chosen.to(tl.int32), 0) != 0)[None, :]
    reads = (tl.max(chosen.to(tl.int32), 1) != 0)[:, None]
    w = tl.load(rows + k[:, None], mask=present & (k < K)[:, None], other=0)
    acc = tl.zeros(chosen.shape, tl.float32)
    x_rows = x + token[:, None] * x_stride
    part = tl.load(x_rows + k[None, :], mask=reads & (k < K)[None, :], other=0)
    for step in range(0, SPLIT, STEP):
        left, right = part, w
        if step + STEP < SPLIT:
            k = start + step + STEP + tl.arange(0, STEP)
            w = tl.load(rows + k[:, None], mask=present & (k < K)[:, None], other=0)
            part = tl.load(x_rows + k[None, :], mask=reads & (k < K)[None, :], other=0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    return acc


@triton.jit
def lora_shrink(
    x: tensor, a0: tensor, a1: tensor, a2: tensor, selected: tensor, inner: tensor,
    x_stride: tensor, tokens: tensor, K: tl.constexpr, C: tl.constexpr,
    RANK: tl.constexpr, SPLIT: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Store one split of ``A(x)``: ``inner`` [splits, layers, tokens, rank].

    Grid: tiles of tokens, tiles of columns of one layer after the other, splits of K.
    Stores the columns that a token selects. The previous kernel may still run.
    """
    pdl_start_next(PDL)
    tiles: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    layer = tl.program_id(1) // tiles
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    column = (tl.program_id(1) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    chosen = load_chosen(selected, token, column, tokens, C)
    if tl.max(tl.max(chosen.to(tl.int32), 0), 0) == 0:
        pdl_wait(PDL)
        return
    a = a0
    if layer == 1:
        a = a1
    if layer == 2:
        a = a2
    acc = sum_split(x, a, chosen, token, column, x_stride, tl.program_id(2) * SPLIT, K,
                    SPLIT, STEP)  # fmt: skip
    layers = tl.num_programs(1) // tiles
    place = (tl.program_id(2) * layers + layer).to(tl.int64) * tokens + token
    tl.store(inner + place[:, None] * RANK + (column % RANK)[None, :], acc, mask=chosen)
    pdl_wait(PDL)


@triton.jit
def load_inner(
    inner: tensor, chosen: tensor, token: tensor, column: tensor, layer: tensor,
    tokens: tensor, KIND: tl.constexpr, LAYERS: tl.constexpr, RANK: tl.constexpr,
    RANK_P: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr,
) -> tensor:  # fmt: skip
    """Sum the splits, and place them at the selected columns; 0 in all others."""
    rank = tl.arange(0, RANK_P)
    reads = tl.max(chosen.to(tl.int32), 1) != 0
    mask = reads[:, None] & (rank < RANK)[None, :]
    at = token[:, None] * RANK + rank[None, :]
    total = tl.zeros((TOKENS, RANK_P), tl.float32)
    for split in tl.static_range(SPLITS):
        place = (split * LAYERS + layer).to(tl.int64) * tokens * RANK
        total += tl.load(inner + place + at, mask=mask, other=0)
    # Copied to the columns of all adapters by a product with zeros and ones.
    copies = rank[:, None] == (column % RANK)[None, :]
    copies = copies.to(tl.float32).to(KIND)
    part = tl.dot(total.to(KIND), copies, input_precision="ieee")
    return tl.where(chosen, part, 0.0).to(KIND)


@triton.jit
def load_b(
    b: tensor, rows: tensor, column: tensor, chosen: tensor, width: tensor,
    C: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load the columns of ``b`` [N, C] that a token of the tile selects: [C, N]."""
    present = tl.max(chosen.to(tl.int32), 0) != 0
    mask = present[:, None] & (rows < width)[None, :]
    return tl.load(b + rows.to(tl.int64)[None, :] * C + column[:, None], mask=mask,
                   other=0)  # fmt: skip


@triton.jit
def lora_expand(
    y0: tensor, y1: tensor, y2: tensor, b0: tensor, b1: tensor, b2: tensor,
    z: tensor, selected: tensor, inner: tensor,
    stride0: tensor, stride1: tensor, stride2: tensor, n0: tensor, n1: tensor,
    n2: tensor, tokens: tensor, C: tl.constexpr, RANK: tl.constexpr,
    RANK_P: tl.constexpr, LAYERS: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Add ``B(inner)`` to ``y`` of each layer, or store the activation of two of them.

    Grid: tiles of tokens, tiles of outputs of one layer after the other; of the first
    only where ``GATED``.
    """
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    tile, layer = tl.program_id(1), tl.program_id(1) * 0
    y, b, stride, width = y0, b0, stride0, n0
    if LAYERS > 1 and not GATED:
        first = tl.cdiv(n0, ROWS)
        if tile >= first:
            y, b, stride, width = y1, b1, stride1, n1
            layer, tile = layer + 1, tile - first
            second = tl.cdiv(n1, ROWS)
            if tile >= second:
                y, b, stride, width = y2, b2, stride2, n2
                layer, tile = layer + 1, tile - second
    kind: tl.constexpr = y0.dtype.element_ty
    rows = tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    chosen = load_chosen(selected, token, column, tokens, C)
    if not GATED and C <= COLUMNS:  # noqa: SIM102 - known when compiling
        if tl.max(tl.max(chosen.to(tl.int32), 0), 0) == 0:
            pdl_sync(PDL)
            return
    w = load_b(b, rows, column, chosen, width, C)
    if GATED:
        w_up = load_b(b1, rows, column, chosen, width, C)
    pdl_sync(PDL)
    inside = (token < tokens)[:, None] & (rows < width)[None, :]
    at = token[:, None] * stride + rows[None, :]
    acc = tl.load(y + at, mask=inside, other=0).to(tl.float32)
    if GATED:
        at = token[:, None] * stride1 + rows[None, :]
        up = tl.load(y1 + at, mask=inside, other=0).to(tl.float32)
    for start in range(0, C, COLUMNS):
        if start > 0:
            column = start + tl.arange(0, COLUMNS)
            chosen = load_chosen(selected, token, column, tokens, C)
            w = load_b(b, rows, column, chosen, width, C)
            if GATED:
                w_up = load_b(b1, rows, column, chosen, width, C)
        if tl.max(tl.max(chosen.to(tl.int32), 0), 0) != 0:
            part = load_inner(inner, chosen, token, column, layer, tokens, kind, LAYERS,
                              RANK, RANK_P, SPLITS, TOKENS)  # fmt: skip
            acc = tl.dot(part, w, acc, input_precision="ieee")
            if GATED:
                part = load_inner(inner, chosen, token, column, layer + 1, tokens, kind,
                                  LAYERS, RANK, RANK_P, SPLITS, TOKENS)  # fmt: skip
                up = tl.dot(part, w_up, up, input_precision="ieee")
    if GATED:
        acc, up = acc.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
        acc = activate_gate(acc, up, SILU)
        tl.store(z + token[:, None] * width + rows[None, :], acc, mask=inside)
    else:
        tl.store(y + at, acc, mask=inside)

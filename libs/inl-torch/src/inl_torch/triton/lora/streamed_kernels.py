"""Triton kernel of a product of a few rows with adapters.

The first programs multiply with tiles of ``A`` as the others do with tiles of the base
matrix, which adds no launch and few bytes. The others add ``B(A(x))`` at their end, by
when the first ones have usually finished.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.barrier import finish_stores
from inl_torch.triton.lora.kernels import load_chosen, load_selected
from inl_torch.triton.matmul.activation import activate_gate
from inl_torch.triton.matmul.streamed import stream_sums
from inl_torch.triton.pdl import pdl_sync


@triton.jit
def _store_inner(
    x: tensor, a: tensor, up_a: tensor, selected: tensor, inner: tensor, layer: tensor,
    first: tensor, token: tensor, x_stride: tensor, tokens: tensor, k: tensor,
    C: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Store ``selected * A(x)`` of a tile of columns, unless no token selects one."""
    column = first + tl.arange(0, ROWS)
    chosen = load_chosen(selected, token, column, tokens, C)
    is_chosen = tl.max(tl.max(chosen.to(tl.int32), 0), 0) != 0
    pdl_sync(PDL)
    if is_chosen:
        # Rows out of bounds read the last one: no mask delays the loads.
        row = tl.minimum(column, C - 1)
        acc, up_acc = stream_sums(
            x, a, up_a, row, token, x_stride, tokens, C, k, ROWS, TOKENS, COLUMNS,
            STAGES, EVEN, GATED,
        )  # fmt: skip
        at = (layer * tokens + token)[:, None] * C + column[None, :]
        known = (token < tokens)[:, None] & (column < C)[None, :]
        tl.store(inner + at, tl.where(chosen, tl.trans(acc), 0), mask=known)
        if GATED:
            at += tokens * C
            tl.store(inner + at, tl.where(chosen, tl.trans(up_acc), 0), mask=known)


@triton.jit
def adapted_product(
    x: tensor, weight: tensor, up: tensor, bias: tensor, y: tensor, a0: tensor,
    a1: tensor, a2: tensor, b0: tensor, b1: tensor, b2: tensor, selected: tensor,
    inner: tensor, counter: tensor, x_stride: tensor, tokens: tensor, n: tensor,
    k: tensor, n0: tensor, n1: tensor, C: tl.constexpr, LAYERS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    B_COLUMNS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    EVEN_INPUTS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    SILU: tl.constexpr, WAITS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Store ``weight(x) + B(A(x))``, or the activation of two such sums if ``GATED``.

    Grid: tiles of columns of A, of one layer after the other or of both if ``GATED``,
    then tiles of outputs. ``weight`` [n, k] stacks three layers of n0, n1 and the
    remaining outputs, unless ``LAYERS`` is 1 or ``GATED``. inner: [layers, tokens, C],
    scratch memory. counter: see :mod:`inl_torch.triton.counters`. EVEN_INPUTS: whether
    ``COLUMNS`` divides k. WAITS: see ``finish_stores``.
    """
    tiles: tl.constexpr = (C + ROWS - 1) // ROWS
    leading: tl.constexpr = tiles if GATED else tiles * LAYERS
    tile, token = tl.program_id(0), tl.arange(0, TOKENS).to(tl.int64)
    if tile < leading:
        layer = tile // tiles
        a, up_a = a0, a1
        if not GATED:
            if layer == 1:
                a = a1
            if layer == 2:
                a = a2
        _store_inner(
            x, a, up_a, selected, inner, layer, tile % tiles * ROWS, token, x_stride,
            tokens, k, C, ROWS, TOKENS, COLUMNS, STAGES, EVEN_INPUTS, GATED, PDL,
        )  # fmt: skip
        finish_stores(WAITS)
        tl.atomic_add(counter, 1, sem="release")
        return
    pdl_sync(PDL)
    first = (tile - leading) * ROWS
    row = first + tl.arange(0, ROWS)
    b, layer, local, width = b0, tile * 0, row, n
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
        if start == 0:
            # The programs of A have lower numbers, and so began before this one.
            total = tl.num_programs(0)
            while tl.atomic_add(counter, 0, sem="acquire") % total < leading:
                pass
            tl.atomic_add(counter, 1, sem="relaxed")
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

"""Products of a few rows with adapters: the base matrix is read once, and the terms of
adapters are added before the result is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.ops.linear import Linear
from inl.ops.lora import GatedLora, Lora, QkvLora
from inl.spec.kernel import PLAIN, Kernel
from inl.spec.selection import layout_of
from inl_torch.eager.linear import QKV, StackedQkv, can_stack_qkv, stack_qkv
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype
from inl_torch.triton.lora.kernels import load_b, load_chosen, load_inner
from inl_torch.triton.lora.lora import shrink, token_tile
from inl_torch.triton.matmul.activation import activate_gate, refuse_activation
from inl_torch.triton.matmul.products import is_wide
from inl_torch.triton.matmul.streamed import stream_sums, stream_tile
from inl_torch.triton.pdl import pdl_sync
from inl_torch.triton.tuning import Tuning

SPLIT: Final = 1024
"""Elements of the input of a program that computes A(x), so few that it ends before
most products do."""

STEP: Final = 256
"""Elements of the input that it loads at a time."""

COLUMNS: Final = 128
"""Most columns of B of a tile."""

DIVISOR: Final = 64
"""Divisor of the outputs of stacked layers: no tile has rows of two layers."""


@triton.jit
def adapted_product(
    x: tensor, weight: tensor, up: tensor, bias: tensor, y: tensor, b0: tensor,
    b1: tensor, b2: tensor, selected: tensor, inner: tensor, x_stride: tensor,
    tokens: tensor, n: tensor, k: tensor, n0: tensor, n1: tensor, C: tl.constexpr,
    RANK: tl.constexpr, RANK_P: tl.constexpr, LAYERS: tl.constexpr,
    SPLITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, B_COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    SILU: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Store ``weight(x) + B(inner)``, or the activation of two such sums if ``GATED``.

    ``weight`` [n, k] stacks three layers of n0, n1 and the remaining outputs, unless
    ``LAYERS`` is 1 or ``GATED``. The previous kernel writes ``inner`` only, and has
    waited for ``x`` before this one starts.
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
    acc, up_acc = stream_sums(
        x, weight, up, row, token, x_stride, tokens, n, k, ROWS, TOKENS, COLUMNS,
        STAGES, EVEN, GATED,
    )  # fmt: skip
    # Loaded here: before the loop over inputs they would delay it.
    column = tl.arange(0, B_COLUMNS)
    chosen = load_chosen(selected, token, column, tokens, C)
    w = load_b(b, local, column, chosen, width, C)
    if GATED:
        w_up = load_b(b1, local, column, chosen, width, C)
    kind: tl.constexpr = x.dtype.element_ty
    pdl_sync(PDL)
    for start in range(0, C, B_COLUMNS):
        if start > 0:
            column = start + tl.arange(0, B_COLUMNS)
            chosen = load_chosen(selected, token, column, tokens, C)
            w = load_b(b, local, column, chosen, width, C)
            if GATED:
                w_up = load_b(b1, local, column, chosen, width, C)
        if tl.max(tl.max(chosen.to(tl.int32), 0), 0) != 0:
            part = load_inner(inner, chosen, token, column, layer, tokens, kind, LAYERS,
                              RANK, RANK_P, SPLITS, TOKENS)  # fmt: skip
            acc = tl.dot(tl.trans(w), tl.trans(part), acc, input_precision="ieee")
            if GATED:
                part = load_inner(inner, chosen, token, column, layer + 1, tokens, kind,
                                  LAYERS, RANK, RANK_P, SPLITS, TOKENS)  # fmt: skip
                part = tl.trans(part)
                up_acc = tl.dot(tl.trans(w_up), part, up_acc, input_precision="ieee")
    if GATED:
        acc = activate_gate(acc, up_acc, SILU)
    if HAS_BIAS:
        offset = tl.load(bias + row, mask=row < n, other=0).to(tl.float32)
        acc += offset[:, None]
    both = (token < tokens)[None, :] & (row < n)[:, None]
    tl.store(y + token[None, :] * n + row[:, None], acc, mask=both)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    loras: Sequence[Lora], selected: torch.Tensor, rank: int, tuning: Tuning, *,
    up: torch.Tensor | None = None, activation: str = "",
) -> torch.Tensor:  # fmt: skip
    """Return ``x`` [T, K] @ ``weight`` [N, K].T + ``bias`` with adapters: [T, N].

    loras: one, or three whose outputs are stacked in ``weight``, or those of ``weight``
    and ``up``; the result is then ``activation(weight(x)) * up(x)``.
    """
    x, selected = dense(x), selected.contiguous()
    (tokens, k), n, columns = x.shape, weight.shape[0], selected.shape[1]
    inner = shrink(
        x, [lora.a for lora in loras], selected, rank, tuning,
        SPLIT, STEP, is_new=True,
    )  # fmt: skip
    y = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    padded, gated = token_tile(tokens), up is not None
    tile = stream_tile(n, padded, gated=gated)
    matrices = [*(lora.b for lora in loras), *[loras[0].b] * (3 - len(loras))]
    adapted_product[(-(-n // tile.rows),)](
        x, weight, weight if up is None else up, weight if bias is None else bias, y,
        *matrices, selected, inner, x.stride(0), tokens, n, k, matrices[0].shape[0],
        matrices[1].shape[0], C=columns, RANK=rank, RANK_P=max(power(rank), 16),
        LAYERS=len(loras), SPLITS=inner.shape[0], TOKENS=padded, ROWS=tile.rows,
        COLUMNS=tile.columns, B_COLUMNS=min(max(power(columns), 16), COLUMNS),
        STAGES=tile.stages, EVEN=n % tile.rows == 0 and k % tile.columns == 0,
        HAS_BIAS=bias is not None, GATED=gated, SILU=activation == "silu",
        PDL=tuning.uses_pdl(tokens), num_warps=tile.warps, **tuning.launch(tokens),
    )  # fmt: skip
    return y


def adapted_linear(
    x: torch.Tensor, w: Linear, loras: Lora, selected: torch.Tensor, *, rank: int,
    tuning: Tuning,
) -> torch.Tensor:  # fmt: skip
    return product(x, w.weight, w.bias, [loras], selected, rank, tuning)


def adapted_qkv_linear(
    x: torch.Tensor, w: StackedQkv, loras: QkvLora, selected: torch.Tensor, *,
    rank: int, tuning: Tuning,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    pairs = [Lora(*loras[at : at + 2]) for at in (0, 2, 4)]
    y = product(x, w.weight, w.bias, pairs, selected, rank, tuning)
    return y.split_with_sizes([pair.b.shape[0] for pair in pairs], 1)


def adapted_gate_up(
    x: torch.Tensor, gate: Linear, up: Linear, w: GatedLora, selected: torch.Tensor, *,
    rank: int, activation: str, tuning: Tuning,
) -> torch.Tensor:  # fmt: skip
    pairs = [Lora(w.gate_a, w.gate_b), Lora(w.up_a, w.up_b)]
    return product(
        x, gate.weight, None, pairs, selected, rank, tuning, up=up.weight,
        activation=activation,
    )  # fmt: skip


def _not_streamed(x: Any, matrix: tuple[int, ...], tuning: Tuning) -> str | None:
    tokens, most = x.shape[0], tuning.max_streamed_rows
    if not 2 <= tokens <= most:
        return f"takes 2 to {most} rows, found {tokens}"
    if str(x.dtype).removeprefix("torch.") == "float32":
        return "takes float16 and bfloat16, found float32"
    if not is_wide(matrix, tuning):
        size = " x ".join(map(str, matrix))
        return f"streams large matrices, found {size}: others lose nothing in cache"
    return refuse_dtype(x)


def _refuse(x: Any, w: Any, *_: Any, tuning: Tuning, **_attrs: Any) -> str | None:
    return _not_streamed(x, w.weight.shape, tuning)


def _refuse_qkv(x: Any, w: Any, *_: Any, tuning: Tuning, **_attrs: Any) -> str | None:
    sizes = [part.shape[0] for part in (w.q, w.k, w.v)]
    if any(size % DIVISOR for size in sizes):
        return f"takes multiples of {DIVISOR} outputs, found {sizes}"
    return _not_streamed(x, (sum(sizes), w.q.shape[1]), tuning)


def _refuse_gate_up(
    x: Any, gate: Any, up: Any, *_: Any, activation: str, tuning: Tuning, **_attrs: Any
) -> str | None:
    for each in (gate, up):
        if layout_of(each) != PLAIN or each.bias is not None:
            return "takes unpacked layers without bias"
    reason = refuse_activation(activation)
    return reason or _not_streamed(x, gate.weight.shape, tuning)


def kernels(tuning: Tuning) -> Iterable[Kernel]:
    """Return the kernels of adapted layers."""
    runs = (adapted_linear, _refuse), (adapted_gate_up, _refuse_gate_up)
    for run, refuse in runs:
        yield Kernel(
            run.__name__,
            "triton",
            partial(run, tuning=tuning),
            refuse=partial(refuse, tuning=tuning),
            preference=PREFERENCE,
        )
    yield Kernel(
        "adapted_qkv_linear",
        "triton",
        partial(adapted_qkv_linear, tuning=tuning),
        refuse=partial(_refuse_qkv, tuning=tuning),
        layout=QKV,
        pack=stack_qkv,
        can_pack=can_stack_qkv,
        preference=PREFERENCE,
    )

"""Products whose bits do not depend on the number of rows, for the invariant mode.

Every step uses the same tile, so that the elements of a row are multiplied and added in
the same order beside any others. Slower than the library, and than the kernels of few
rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.ops.linear import Linear
from inl.spec.kernel import Kernel
from inl_torch.eager.linear import QKV, StackedQkv, can_stack_qkv, stack_qkv
from inl_torch.eager.mlp import GATE_UP, StackedMlp, stack_mlp
from inl_torch.triton.common import dense, refuse_dtype, spread
from inl_torch.triton.matmul.activation import gated_activation, refuse_activation

NAME = "triton_rows"
"""Name of the batch-invariant kernels; others are preferred."""

TILE, FLOAT32_TILE = 64, 32
"""Tokens, outputs and inputs of a tile."""


@triton.jit
def fixed_product(
    x: tensor, weight: tensor, bias: tensor, y: tensor, x_stride: tensor,
    tokens: tensor, N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply a tile of tokens with a tile of rows of ``weight`` [N, K]."""
    token = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    acc = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, TILE):
        at = start + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & (at < K)[None, :]
        a = tl.load(x + token[:, None] * x_stride + at[None, :], mask=inside, other=0)
        inside = (row < N)[None, :] & (at < K)[:, None]
        w = tl.load(weight + row[None, :] * K + at[:, None], mask=inside, other=0)
        acc = tl.dot(a, w, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + row, mask=row < N, other=0).to(tl.float32)[None, :]
    both = (token < tokens)[:, None] & (row < N)[None, :]
    tl.store(y + token[:, None] * N + row[None, :], acc, mask=both)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x`` [..., K] @ ``weight`` [N, K].T + ``bias`` [N]: [..., N]."""
    flat = dense(x.reshape(-1, x.shape[-1]))
    (tokens, k), n = flat.shape, weight.shape[0]
    y = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    tile = FLOAT32_TILE if x.dtype == torch.float32 else TILE
    fixed_product[(-(-n // tile), -(-tokens // tile))](
        flat, weight, weight if bias is None else bias, y, flat.stride(0), tokens, N=n,
        K=k, HAS_BIAS=bias is not None, TILE=tile,
        num_warps=spread(4, x), num_stages=3,
    )  # fmt: skip
    return y.view(*x.shape[:-1], n)


def linear(x: torch.Tensor, w: Linear) -> torch.Tensor:
    return product(x, w.weight, w.bias)


def qkv_linear(x: torch.Tensor, w: StackedQkv) -> tuple[torch.Tensor, ...]:
    keys = w.keys.shape[0]
    sizes = (w.weight.shape[0] - 2 * keys, keys, keys)
    return product(x, w.weight, w.bias).split_with_sizes(sizes, 1)


def gated_mlp(x: torch.Tensor, w: StackedMlp, *, activation: str) -> torch.Tensor:
    gate, up = product(x, w.gate_up).chunk(2, 1)
    return product(gated_activation(gate, up, activation=activation), w.down)


def _refuse(x: Any, _w: Any, *, activation: str = "silu") -> str | None:
    return refuse_activation(activation) or refuse_dtype(x)


def kernels() -> Iterable[Kernel]:
    """Return the products, with the layouts of the faster kernels."""
    options: dict[str, Any] = {"refuse": _refuse, "invariant": True, "preference": -1}
    yield Kernel("linear", NAME, linear, **options)
    yield Kernel(
        "qkv_linear", NAME, qkv_linear, layout=QKV, pack=stack_qkv,
        can_pack=can_stack_qkv, **options,
    )  # fmt: skip
    yield Kernel(
        "gated_mlp", NAME, gated_mlp, layout=GATE_UP, pack=stack_mlp, **options
    )


KERNELS = tuple(kernels())

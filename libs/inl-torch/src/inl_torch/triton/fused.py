"""Regions of a decoding step, a launch or two each: see :mod:`inl.ops.fused`.

They take steps of a few rows with one token each, which read every weight once and
compute next to nothing; larger ones go through the ops that a region is made of, but
for attention, which takes steps of every kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.spec.kernel import Kernel
from inl.spec.values import Cache, Step
from inl_torch.eager.linear import QKV, StackedQkv, qkv_stacks, stack_qkv
from inl_torch.eager.linear import product as library_product
from inl_torch.eager.mlp import GATE_UP, StackedMlp, stack_mlp
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype
from inl_torch.triton.mlp import refuse_activation
from inl_torch.triton.products import (
    norm_product,
    norm_products,
    product,
    products,
)
from inl_torch.triton.rope_attend import MOST_HEADS, launch, plan
from inl_torch.triton.tuning import IN_TURNS, TURNS, Tuning

MOST_ROWS = 1024
"""Rows of a decoding step whose attention is one launch."""


def norm_qkv(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, w: StackedQkv, *,
    eps: float, tuning: Tuning,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    total, y = normed(residual, delta, None, norm, w.weight, w.bias, eps, tuning)
    keys = w.keys.shape[0]
    sizes = (y.shape[1] - 2 * keys, keys, keys)
    return total, *y.split_with_sizes(sizes, 1)


def norm_mlp(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, w: StackedMlp, *,
    eps: float, activation: str, tuning: Tuning,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    total, y = normed(
        residual, delta, None, norm, w.gate_up, None, eps, tuning, gated=activation
    )
    return total, times(y, w.down, None, tuning)


def norm_logits(
    residual: torch.Tensor, delta: torch.Tensor, samples: torch.Tensor, norm: Norm,
    w: Linear, *, eps: float, tuning: Tuning,
) -> torch.Tensor:  # fmt: skip
    return normed(residual, delta, samples, norm, w.weight, w.bias, eps, tuning)[1]


def attend_project(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, cache: Cache, step: Step, w: Linear, *, scale: float,
    window: int | None = None, cap: float | None = None, group: int = 0,
    tuning: Tuning,
) -> tuple[torch.Tensor, Cache]:  # fmt: skip
    out = launch(
        q, k, v, cos, sin, cache, step, scale=scale, window=window, cap=cap,
        group=group, tuning=tuning,
    )  # fmt: skip
    return times(out.view(q.shape[0], -1), w.weight, w.bias, tuning), cache


def normed(
    residual: torch.Tensor,
    delta: torch.Tensor,
    samples: torch.Tensor | None,
    norm: Norm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    tuning: Tuning,
    *,
    gated: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum [T, K], and the product [S, N] of its norm; S is T where all is taken."""
    residual, delta = dense(residual), dense(delta)
    k, n = weight.shape[1], weight.shape[0] // (2 if gated else 1)
    tokens = residual.shape[0] if samples is None else samples.shape[0]
    y = torch.empty((tokens, n), dtype=residual.dtype, device=residual.device)
    total = y
    if samples is None:
        total = torch.empty((tokens, k), dtype=residual.dtype, device=residual.device)
    tensors = (
        residual, delta, delta if samples is None else samples, norm.weight, weight,
        weight if bias is None else bias, total, y, residual.stride(0), delta.stride(0),
    )  # fmt: skip
    facts = {
        "N": n, "K": k, "TAKES": samples is not None, "BIASED": bias is not None,
        "GATED": bool(gated), "SILU": gated == "silu",
    }  # fmt: skip
    kind = "gated" if gated else "norm"
    run(norm_product, norm_products, (*tensors, eps), facts, kind, tokens, tuning)
    return total, y


def times(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tuning: Tuning
) -> torch.Tensor:
    """``x`` [T, K] times the transpose of ``weight`` [N, K]: [T, N]."""
    (n, k), tokens = weight.shape, x.shape[0]
    if _library(tokens, tuning, weight.shape):
        return library_product(x, weight, bias)
    y = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    tensors = (x, weight, weight if bias is None else bias, y, x.stride(0))
    facts = {"N": n, "K": k, "BIASED": bias is not None}
    run(product, products, tensors, facts, "plain", tokens, tuning)
    return y


def run(
    one: Any, several: Any, tensors: tuple[Any, ...], facts: dict[str, Any], kind: str,
    tokens: int, tuning: Tuning,
) -> None:  # fmt: skip
    """Launch the program for one row or that for several, with the tile of its kind."""
    chosen = one if tokens == 1 else several
    if tokens > 1:
        kind += IN_TURNS
        facts = {**facts, "TOKENS": tokens, "TOKENS_P": power(tokens)}
    tile = tuning.tile(kind, facts["N"], facts["K"])
    chosen[(-(-facts["N"] // tile.rows), 1)](
        *tensors, **facts, ROWS=tile.rows, COLUMNS=tile.columns,
        EARLY=tuning.starts_early(tokens), num_warps=tile.warps,
        **tuning.launch(tokens),
    )  # fmt: skip


def _library(rows: int, tuning: Tuning, *matrices: tuple[int, ...]) -> str | None:
    """Say why the device's own library is better, where it is."""
    if rows > TURNS:
        return f"takes {TURNS} rows at most, found {rows}: the library is faster"
    largest = max(m[0] * m[1] for m in matrices)
    if rows > 1 and largest > tuning.shared_elements:
        return f"of {largest} weights, for {rows} rows, the library makes more"
    return None


def refuse_qkv(
    residual: Any,
    _delta: Any,
    _norm: Any,
    w: Any,
    *,
    tuning: Tuning,
    **_: Any,
) -> str | None:
    rows = sum(part.shape[0] for part in (w.q, w.k, w.v))
    size = (rows, w.q.shape[1])
    return _library(residual.shape[0], tuning, size) or refuse_dtype(residual)


def refuse_mlp(
    residual: Any, _delta: Any, _norm: Any, w: Any, *, eps: float, activation: str,  # noqa: ARG001
    tuning: Tuning,
) -> str | None:  # fmt: skip
    refused = refuse_activation(activation)
    inner, hidden = w.gate.shape
    sizes = (2 * inner, hidden), w.down.shape
    refused = refused or _library(residual.shape[0], tuning, *sizes)
    return refused or refuse_dtype(residual)


def refuse_logits(
    residual: Any, _delta: Any, samples: Any, _norm: Any, w: Any, *, eps: float,  # noqa: ARG001
    tuning: Tuning,
) -> str | None:  # fmt: skip
    rows, size = samples.shape[0], w.weight.shape
    return _library(rows, tuning, size) or refuse_dtype(residual)


def refuse_attend(
    q: Any, _k: Any, _v: Any, _cos: Any, _sin: Any, _cache: Any, step: Any, _w: Any,
    **_: Any,
) -> str | None:  # fmt: skip
    tokens, rows = q.shape[0], step.lengths.shape[0]
    if q.shape[2] > 256 or q.shape[2] % 2:
        return f"heads of {q.shape[2]} elements, takes even ones up to 256"
    if q.shape[1] > MOST_HEADS:
        return f"takes {MOST_HEADS} heads at most, found {q.shape[1]}"
    if tokens == rows and tokens > MOST_ROWS:
        return f"takes {MOST_ROWS} rows at most, found {tokens}"
    return refuse_dtype(q)


def kernels(tuning: Tuning) -> Iterable[Kernel]:
    """The kernels of every region, cut as ``tuning`` says."""

    def kernel(
        op: str, run: Callable[..., Any], refuse: Callable[..., Any], **more: Any
    ) -> Kernel:
        return Kernel(
            op,
            "triton",
            partial(run, tuning=tuning),
            refuse=partial(refuse, tuning=tuning),
            preference=PREFERENCE,
            **more,
        )

    yield kernel(
        "norm_qkv",
        norm_qkv,
        refuse_qkv,
        layout=QKV,
        prepare=stack_qkv,
        packs=qkv_stacks,
    )
    yield kernel("norm_mlp", norm_mlp, refuse_mlp, layout=GATE_UP, prepare=stack_mlp)
    yield kernel("norm_logits", norm_logits, refuse_logits)
    yield kernel("attend_project", attend_project, refuse_attend, plan=plan)

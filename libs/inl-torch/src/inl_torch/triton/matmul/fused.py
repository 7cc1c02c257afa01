"""Fused ops of a decoding step, of one or two launches each: see :mod:`inl.ops.fused`.

They support steps of a few rows with one token each, which are limited by reading the
weights; larger steps use the unfused ops, except that attention supports all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.eager.linear import QKV, StackedQkv, can_stack_qkv, stack_qkv
from inl_torch.eager.mlp import GATE_UP, StackedMlp, stack_mlp
from inl_torch.triton.attention.rope_attend import MAX_HEADS, decode_attention, plan
from inl_torch.triton.common import PREFERENCE, refuse_dtype, refuse_row
from inl_torch.triton.matmul.activation import refuse_activation
from inl_torch.triton.matmul.products import library_is_faster, multiply, norm_product
from inl_torch.triton.tuning import Tuning

MAX_ROWS = 1024
"""Most rows of a decoding step whose attention is one launch."""


def norm_qkv(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, w: StackedQkv, *,
    eps: float, tuning: Tuning,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    summed, y = norm_product(residual, delta, None, norm, w.weight, w.bias, eps, tuning)
    keys = w.keys.shape[0]
    sizes = (y.shape[1] - 2 * keys, keys, keys)
    return summed, *y.split_with_sizes(sizes, 1)


def norm_mlp(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, w: StackedMlp, *,
    eps: float, activation: str, tuning: Tuning,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    summed, y = norm_product(
        residual, delta, None, norm, w.gate_up, None, eps, tuning, gated=activation
    )
    return summed, multiply(y, w.down, None, tuning)


def norm_logits(
    residual: torch.Tensor, delta: torch.Tensor, samples: torch.Tensor, norm: Norm,
    w: Linear, *, eps: float, tuning: Tuning,
) -> torch.Tensor:  # fmt: skip
    return norm_product(residual, delta, samples, norm, w.weight, w.bias, eps, tuning)[
        1
    ]


def attend_project(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, cache: Cache, step: Step, w: Linear, *, scale: float,
    window: int | None = None, cap: float | None = None, group: int = 0,
    tuning: Tuning,
) -> tuple[torch.Tensor, Cache]:  # fmt: skip
    out = decode_attention(
        q, k, v, cos, sin, cache, step, scale=scale, window=window, cap=cap,
        group=group, tuning=tuning,
    )  # fmt: skip
    return multiply(out.view(q.shape[0], -1), w.weight, w.bias, tuning), cache


def rope_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, cache: Cache, step: Step, *, scale: float,
    window: int | None = None, cap: float | None = None, group: int = 0,
    tuning: Tuning,
) -> tuple[torch.Tensor, Cache]:  # fmt: skip
    out = decode_attention(
        q, k, v, cos, sin, cache, step, scale=scale, window=window, cap=cap,
        group=group, tuning=tuning, label="rope_attend/triton",
    )  # fmt: skip
    return out, cache


def refuse_qkv(
    residual: Any,
    _delta: Any,
    _norm: Any,
    w: Any,
    *,
    tuning: Tuning,
    **_: Any,
) -> str | None:
    size = sum(part.shape[0] for part in (w.q, w.k, w.v)), w.q.shape[1]
    tokens, dtype = residual.shape[0], residual.dtype
    return library_is_faster(tokens, dtype, size, tuning) or refuse_dtype(residual)


def refuse_mlp(
    residual: Any, _delta: Any, _norm: Any, w: Any, *, eps: float, activation: str,  # noqa: ARG001
    tuning: Tuning,
) -> str | None:  # fmt: skip
    size = 2 * w.gate.shape[0], w.gate.shape[1]
    tokens, dtype = residual.shape[0], residual.dtype
    reason = refuse_activation(activation) or refuse_dtype(residual)
    return reason or library_is_faster(tokens, dtype, size, tuning)


def refuse_logits(
    residual: Any, _delta: Any, _samples: Any, _norm: Any, _w: Any, **_: Any
) -> str | None:
    return refuse_row(residual, residual.shape[1])


def refuse_attend(
    q: Any, _k: Any, _v: Any, _cos: Any, _sin: Any, _cache: Any, step: Any,
    _w: Any = None, *, tuning: Tuning, **_: Any,
) -> str | None:  # fmt: skip
    tokens, rows = q.shape[0], step.lengths.shape[0]
    if q.shape[2] > tuning.max_head_dim or q.shape[2] % 2:
        most = tuning.max_head_dim
        return f"heads of {q.shape[2]} elements, takes even sizes up to {most}"
    if q.shape[1] > MAX_HEADS:
        return f"takes {MAX_HEADS} heads at most, found {q.shape[1]}"
    if tokens == rows and tokens > MAX_ROWS:
        return f"takes {MAX_ROWS} rows at most, found {tokens}"
    return refuse_dtype(q)


def kernels(tuning: Tuning) -> Iterable[Kernel]:
    """Return the kernels of all fused ops."""

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
        pack=stack_qkv,
        can_pack=can_stack_qkv,
    )
    yield kernel("norm_mlp", norm_mlp, refuse_mlp, layout=GATE_UP, pack=stack_mlp)
    yield kernel("norm_logits", norm_logits, refuse_logits)
    yield kernel("attend_project", attend_project, refuse_attend, plan=plan)
    yield kernel("rope_attend", rope_attend, refuse_attend, plan=plan)

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
from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.eager.linear import QKV, StackedQkv, can_stack_qkv, stack_qkv
from inl_torch.eager.mlp import GATE_UP, StackedMlp, stack_mlp
from inl_torch.triton.attention.rope_attend import MOST_HEADS, launch, plan
from inl_torch.triton.common import PREFERENCE, refuse_dtype, refuse_row
from inl_torch.triton.matmul.activation import refuse_activation
from inl_torch.triton.matmul.products import left_to_library, multiply, normed
from inl_torch.triton.tuning import Tuning

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
    return total, multiply(y, w.down, None, tuning)


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
    return multiply(out.view(q.shape[0], -1), w.weight, w.bias, tuning), cache


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
    return left_to_library(tokens, dtype, size, tuning) or refuse_dtype(residual)


def refuse_mlp(
    residual: Any, _delta: Any, _norm: Any, w: Any, *, eps: float, activation: str,  # noqa: ARG001
    tuning: Tuning,
) -> str | None:  # fmt: skip
    size = 2 * w.gate.shape[0], w.gate.shape[1]
    tokens, dtype = residual.shape[0], residual.dtype
    refused = refuse_activation(activation) or refuse_dtype(residual)
    return refused or left_to_library(tokens, dtype, size, tuning)


def refuse_logits(
    residual: Any, _delta: Any, _samples: Any, _norm: Any, _w: Any, **_: Any
) -> str | None:
    return refuse_row(residual, residual.shape[1])


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
        packs=can_stack_qkv,
    )
    yield kernel("norm_mlp", norm_mlp, refuse_mlp, layout=GATE_UP, prepare=stack_mlp)
    yield kernel("norm_logits", norm_logits, refuse_logits)
    yield kernel("attend_project", attend_project, refuse_attend, plan=plan)

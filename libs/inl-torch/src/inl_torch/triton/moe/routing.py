"""Routing of tokens to experts, in one launch."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.ops.group_route import ExpertBias, check_groups
from inl.ops.moe import KINDS, LEAST, check_routing
from inl.spec.kernel import Kernel
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype
from inl_torch.triton.moe.route_kernels import group_route_row, route_row, sigmoid

MAX_EXPERTS: Final = 4096
"""Most experts, which one program ranks."""


def route(
    logits: torch.Tensor, *, k: int, kind: str, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    check_routing(experts, k, kind)
    ids, weights = _results(logits, k)
    logits = dense(logits)
    route_row[(tokens,)](
        logits, ids, weights, logits.stride(0), EXPERTS=experts,
        EXPERTS_P=power(experts), K=k, K_P=power(k), KIND=KINDS.index(kind),
        RENORMALIZE=renormalize, LEAST=LEAST, num_warps=_warps(power(experts)),
    )  # fmt: skip
    return ids, weights


def group_route(
    logits: torch.Tensor,
    w: ExpertBias,
    *,
    k: int,
    kind: str,
    groups: int,
    chosen: int,
    best_of: int,
    renormalize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    check_groups(experts, k, groups, chosen, best_of)
    ids, weights = _results(logits, k)
    logits, size = dense(logits), experts // groups
    group_route_row[(tokens,)](
        logits, weights if w.bias is None else w.bias, ids, weights, logits.stride(0),
        GROUPS=groups, GROUPS_P=power(groups), SIZE=size, SIZE_P=power(size), K=k,
        K_P=power(k), CHOSEN=chosen, BEST_OF=best_of, SOFTMAX=kind == "softmax",
        HAS_BIAS=w.bias is not None, RENORMALIZE=renormalize, LEAST=LEAST,
        num_warps=_warps(power(groups) * power(size)),
    )  # fmt: skip
    return ids, weights


def _results(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape, device = (logits.shape[0], k), logits.device
    return (
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def _warps(experts: int) -> int:
    # Maxima within a warp need no shared memory.
    return max(experts // 512, 1)


@triton.jit
def gate_row(
    x: tensor, gate: tensor, y: tensor, x_stride: tensor, gate_stride: tensor,
    width: tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """A row times the sigmoid of its gate."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    factor = sigmoid(tl.load(gate + row * gate_stride).to(tl.float32))
    values = tl.load(x + row * x_stride + at, mask=at < width, other=0).to(tl.float32)
    tl.store(y + row * width + at, values * factor, mask=at < width)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    x, (rows, width) = dense(x), x.shape
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = min(power(width), 1024)
    gate_row[(rows, -(-width // block))](
        x, gate, y, x.stride(0), gate.stride(0), width, BLOCK=block, num_warps=4
    )
    return y


def _refuse(logits: Any, *_: Any, **__: Any) -> str | None:
    if logits.shape[-1] > MAX_EXPERTS:
        return f"takes {MAX_EXPERTS} experts at most, found {logits.shape[-1]}"
    return refuse_dtype(logits)


def _refuse_gate(x: Any, _gate: Any) -> str | None:
    return refuse_dtype(x)


KERNELS = tuple(
    Kernel(op, "triton", run, refuse=refuse, invariant=True, preference=PREFERENCE)
    for op, run, refuse in (
        ("route", route, _refuse),
        ("group_route", group_route, _refuse),
        ("sigmoid_gate", sigmoid_gate, _refuse_gate),
    )
)

"""Launches of recurrent layers: one for the delta rule, two for a convolution.

Tokens of a row are computed one after the other in one program, whatever else is in the
step and however a text is divided into steps.
"""

from __future__ import annotations

from typing import Any

import torch

from inl.ops.recurrent import LENGTH_EPS, Decay, Taps
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype, spread
from inl_torch.triton.recurrent.kernels import conv_state, conv_tokens, delta_steps

Pair = tuple[torch.Tensor, torch.Tensor]

COLUMNS = 8
"""Columns of a head's matrix in a program: with one warp, sums over the other axis need
no shared memory."""

CHANNELS = 128
"""Channels of a convolution's program."""

TOKENS = 8
"""Most tokens of a convolution's program."""

WIDEST_KEY = 256
"""Most elements of a key, whose columns one warp keeps in registers."""


def causal_conv(x: torch.Tensor, table: torch.Tensor, step: Step, w: Taps) -> Pair:
    x = dense(x)
    tokens, channels = x.shape
    taps, rows = w.weight.shape[-1], step.slots.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tiles = -(-channels // CHANNELS)
    size = min(power(tokens), TOKENS)
    spans = step.starts, step.positions, step.slots, step.used_counts
    conv_tokens[(-(-tokens // size), tiles)](
        x, table, w.weight.contiguous(), out, step.rows, *spans, tokens, channels,
        x.stride(0), TAPS=taps, TOKENS=size, CHANNELS=CHANNELS,
        num_warps=spread(4, x),
    )  # fmt: skip
    conv_state[(rows, tiles)](
        x, table, *spans, channels, x.stride(0), TAPS=taps, SIZE=power(taps - 1),
        CHANNELS=CHANNELS, num_warps=1,
    )  # fmt: skip
    return out, table


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor,
    b: torch.Tensor, table: torch.Tensor, step: Step, w: Decay, *, tiled: bool,
) -> Pair:  # fmt: skip
    q, k, v, a, b = map(dense, (q, k, v, a, b))
    (_, heads, width), dim = v.shape, q.shape[2]
    # Tokens of padding are not computed.
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    delta_steps[(step.slots.shape[0], heads, -(-width // COLUMNS))](
        q, k, v, a, b, w.rate, w.shift, table, out, step.starts, step.positions,
        step.slots, step.used_counts, *(each.stride(0) for each in (q, k, v, a, b)),
        dim, width, q.shape[1], heads, dim**-0.5, LENGTH_EPS, DIM=power(dim),
        WIDTH=COLUMNS, TILED=tiled, num_warps=spread(1, v),
    )  # fmt: skip
    return out, table


def _refuse_conv(x: Any, _table: Any, _step: Any, w: Taps) -> str | None:
    taps = w.weight.shape[-1]
    if taps < 2:
        return f"convolutions of {taps} taps, takes 2 or more"
    return refuse_dtype(x)


def _refuse_delta(q: Any, *_: Any, tiled: bool) -> str | None:  # noqa: ARG001 - as the op
    if q.shape[-1] > WIDEST_KEY:
        return f"keys of {q.shape[-1]} elements, takes {WIDEST_KEY} at most"
    return refuse_dtype(q)


KERNELS = (
    Kernel(
        "causal_conv", "triton", causal_conv, refuse=_refuse_conv, invariant=True,
        preference=PREFERENCE,
    ),
    Kernel(
        "delta_rule", "triton", delta_rule, refuse=_refuse_delta, invariant=True,
        preference=PREFERENCE,
    ),
)  # fmt: skip

"""Ops over packed weights: few rows read them once, many get them decoded first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from inl.ops.norm import Norm
from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.eager.linear import product as library_product
from inl_torch.triton.attention.rope_attend import launch, plan
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype
from inl_torch.triton.matmul.activation import gated_activation, refuse_activation
from inl_torch.triton.matmul.fused import refuse_attend
from inl_torch.triton.quantized import packed
from inl_torch.triton.quantized.kernels import packed_row, unpack
from inl_torch.triton.quantized.packed import (
    FLOAT8,
    HALF,
    PACKED,
    Packed,
    PackedLinear,
    PackedMlp,
    PackedQkv,
)
from inl_torch.triton.quantized.tiles import packed_rows
from inl_torch.triton.tuning import Tuning

NAME = "triton_packed"

MOST_ALONE = 8
"""Rows up to which, in float32, each reads the weights for itself."""

MOST_ROWS = 32
"""Rows up to which, in half types, tensor cores meet the weights as they are decoded;
more of them win back the time to write the decoded weights."""


class Cut(NamedTuple):
    """Rows, and units of 16 bytes, that a program takes at once."""

    rows: int
    units: int
    warps: int
    stages: int = 1


def alone(n: int, line: int, tuning: Tuning) -> Cut:
    """How the product of one row is cut."""
    units = min(power(line), 128)
    most = max(1024 // units, 1)
    rows = min(max(power(n // (8 * tuning.processors)), 1), most, 8)
    return Cut(rows, units, 4 if rows * units >= 256 else 2)


class Tiles(NamedTuple):
    """How the product of a few rows is cut."""

    tokens: int
    rows: int
    slots: int
    """Slots of each row at once, one a warp."""
    parts: int
    """Parts of a slot that differ in scale."""
    stages: int


def together(w: Packed, tokens: int, tuning: Tuning) -> Tiles:
    """How the product of a few rows is cut."""
    n, line = w.codes.shape
    assert w.scales is not None
    groups = w.scales.shape[1]
    parts = 2 if groups > 1 and line // groups % (2 * HALF) else 1
    # Columns of 16 are the fewest that every chip's matrix units take.
    tokens = min(max(power(tokens), 16 // parts), MOST_ROWS)
    many = n // (64 * tuning.processors)
    rows = (16, 32)[many] if many < 2 else 64 if tokens < MOST_ROWS else 32
    return Tiles(tokens, rows, 4, parts, {8: 4, 16: 3}.get(tokens, 2))


def facts(w: Packed) -> dict[str, Any]:
    """What the programs are compiled for."""
    assert w.scales is not None
    four = w.codes.dtype == torch.uint8
    return {
        "LINE": w.codes.shape[1] // HALF,
        "GROUPS": w.scales.shape[1],
        "BITS": 4 if four else 8,
        "FLOAT": w.codes.dtype == FLOAT8,
        "ZERO": 8.0 if four and w.offsets is None else 0.0,
        "OFFSET": w.offsets is not None,
    }


def parts(w: Packed) -> tuple[Any, Any, Any]:
    """Codes as bytes, scales, and offsets or what stands for them."""
    codes = w.codes.view(torch.uint8)
    return codes, w.scales, w.scales if w.offsets is None else w.offsets


def decoded(w: Packed, dtype: torch.dtype) -> torch.Tensor:
    """The weights as plain numbers [N, K]."""
    if w.scales is None:
        return w.codes
    (n, k), known = w.shape, facts(w)
    y = torch.empty((n, k), dtype=dtype, device=w.codes.device)
    units = min(power(known["LINE"]), 64)
    rows = 512 // units
    unpack[(-(-n // rows), -(-known["LINE"] // units))](
        *parts(w), y, N=n, ROWS=rows, UNITS=units, num_warps=4, **known
    )
    return y


def times(
    x: torch.Tensor, w: Packed, bias: torch.Tensor | None, tuning: Tuning
) -> torch.Tensor:
    """``x`` [T, K] times the transpose of the matrix [N, K]: [T, N]."""
    tokens, narrow = x.shape[0], x.dtype != torch.float32
    most = MOST_ROWS if narrow else MOST_ALONE
    if w.scales is None or tokens > most:
        return library_product(x, decoded(w, x.dtype), bias)
    if tokens > 1 and narrow:
        return _together(dense(x), w, bias, tuning)
    return row_product(x, w, bias, tuning)[1]


def _together(
    x: torch.Tensor, w: Packed, bias: torch.Tensor | None, tuning: Tuning
) -> torch.Tensor:
    tokens, (n, _), known = x.shape[0], w.shape, facts(w)
    y = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    cut = together(w, tokens, tuning)
    packed_rows[(-(-n // cut.rows),)](
        x, *parts(w), y if bias is None else bias, y, x.stride(0), tokens, N=n,
        BIASED=bias is not None, TOKENS=cut.tokens, ROWS=cut.rows, SLOTS=cut.slots,
        PARTS=cut.parts, STAGES=cut.stages, num_warps=cut.slots, **known,
    )  # fmt: skip
    return y


def row_product(
    x: torch.Tensor,
    w: Packed,
    bias: torch.Tensor | None,
    tuning: Tuning,
    *,
    delta: torch.Tensor | None = None,
    samples: torch.Tensor | None = None,
    norm: Norm | None = None,
    eps: float = 0.0,
    gated: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum [T, K] of ``x`` and ``delta``, and the product of its norm: [S, N].

    Without a norm the product is that of ``x``, and the sum is not to be used.
    """
    known, k = facts(w), w.shape[1]
    n = w.shape[0] // (2 if gated else 1)
    x = dense(x)
    delta = x if delta is None else dense(delta)
    tokens = x.shape[0] if samples is None else samples.shape[0]
    y = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    adds = norm is not None and samples is None
    total = torch.empty((tokens, k), dtype=x.dtype, device=x.device) if adds else y
    cut = alone(n, known["LINE"], tuning)
    packed_row[(-(-n // cut.rows), tokens)](
        x, delta, y if samples is None else samples,
        x if norm is None else norm.weight, *parts(w), y if bias is None else bias,
        total, y, x.stride(0), delta.stride(0), eps, N=n, NORMED=norm is not None,
        TAKES=samples is not None, BIASED=bias is not None, GATED=bool(gated),
        SILU=gated == "silu", ROWS=cut.rows, UNITS=cut.units,
        EARLY=tuning.starts_early(tokens), num_warps=cut.warps,
        **known, **tuning.launch(tokens),
    )  # fmt: skip
    return total, y


def linear(x: torch.Tensor, w: PackedLinear, *, tuning: Tuning) -> torch.Tensor:
    return times(x, w.matrix, w.bias, tuning)


def qkv_linear(
    x: torch.Tensor, w: PackedQkv, *, tuning: Tuning
) -> tuple[torch.Tensor, ...]:
    return _split(times(x, w.matrix, w.bias, tuning), w)


def _split(y: torch.Tensor, w: PackedQkv) -> tuple[torch.Tensor, ...]:
    keys = w.keys.shape[0]
    return y.split_with_sizes((y.shape[1] - 2 * keys, keys, keys), 1)


def gated_mlp(
    x: torch.Tensor, w: PackedMlp, *, activation: str, tuning: Tuning
) -> torch.Tensor:
    if x.shape[0] == 1 and w.gate_up.scales is not None:
        inner = row_product(x, w.gate_up, None, tuning, gated=activation)[1]
    else:
        gate, up = times(x, w.gate_up, None, tuning).chunk(2, 1)
        inner = gated_activation(gate, up, activation=activation)
    return times(inner, w.down, None, tuning)


def norm_qkv(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, w: PackedQkv, *,
    eps: float, tuning: Tuning,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    total, y = row_product(
        residual, w.matrix, w.bias, tuning, delta=delta, norm=norm, eps=eps
    )
    return total, *_split(y, w)


def norm_mlp(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, w: PackedMlp, *,
    eps: float, activation: str, tuning: Tuning,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    total, y = row_product(
        residual, w.gate_up, None, tuning, delta=delta, norm=norm, eps=eps,
        gated=activation,
    )  # fmt: skip
    return total, times(y, w.down, None, tuning)


def norm_logits(
    residual: torch.Tensor, delta: torch.Tensor, samples: torch.Tensor, norm: Norm,
    w: PackedLinear, *, eps: float, tuning: Tuning,
) -> torch.Tensor:  # fmt: skip
    return row_product(
        residual, w.matrix, w.bias, tuning, delta=delta, samples=samples, norm=norm,
        eps=eps,
    )[1]  # fmt: skip


def attend_project(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, cache: Cache, step: Step, w: PackedLinear, *, scale: float,
    window: int | None = None, cap: float | None = None, group: int = 0,
    tuning: Tuning,
) -> tuple[torch.Tensor, Cache]:  # fmt: skip
    out = launch(
        q, k, v, cos, sin, cache, step, scale=scale, window=window, cap=cap,
        group=group, tuning=tuning, label=f"attend_project/{NAME}",
    )  # fmt: skip
    return times(out.view(q.shape[0], -1), w.matrix, w.bias, tuning), cache


def refuse(x: Any, *_: Any, tuning: Tuning, **attrs: Any) -> str | None:  # noqa: ARG001
    """Refuse odd dtypes and activations, and nothing for its size."""
    refused = refuse_dtype(x)
    if "activation" in attrs:
        refused = refused or refuse_activation(attrs["activation"])
    return refused


def refuse_rows(
    residual: Any, _delta: Any, *rest: Any, tuning: Tuning, **attrs: Any
) -> str | None:
    """Refuse more than one row, which a product after a norm of its own takes."""
    rows = rest[0].shape[0] if len(rest) > 2 else residual.shape[0]
    if rows > 1:
        return f"takes 1 row, found {rows}: a norm for all of them comes first"
    return refuse(residual, tuning=tuning, **attrs)


def kernels(tuning: Tuning) -> Iterable[Kernel]:
    """The kernels, which take weights that a file holds packed before all others."""

    def kernel(
        op: str, run: Callable[..., Any], refuse: Callable[..., Any], group: str = "",
        **more: Any,
    ) -> Kernel:  # fmt: skip
        pack, packs = GROUPS[group or op]
        return Kernel(
            op,
            NAME,
            partial(run, tuning=tuning),
            refuse=partial(refuse, tuning=tuning),
            layout=PACKED,
            pack=pack,
            can_pack=packs,
            preference=PREFERENCE + 1,
            **more,
        )

    yield kernel("linear", linear, refuse)
    yield kernel("qkv_linear", qkv_linear, refuse)
    yield kernel("gated_mlp", gated_mlp, refuse)
    yield kernel("norm_qkv", norm_qkv, refuse_rows, "qkv_linear")
    yield kernel("norm_mlp", norm_mlp, refuse_rows, "gated_mlp")
    yield kernel("norm_logits", norm_logits, refuse_rows, "linear")
    yield kernel("attend_project", attend_project, refuse_attend, "linear", plan=plan)


GROUPS = {
    "linear": (packed.pack_linear, packed.refuse_parts),
    "qkv_linear": (packed.pack_qkv, packed.refuse_qkv),
    "gated_mlp": (packed.pack_mlp, packed.refuse_mlp),
}
"""How the weights of each op are packed, and why they would not be."""

"""Adapters of one, two or three linear layers of one input, in two launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from inl.ops.lora import GatedLora, Lora, QkvLora
from inl.spec.kernel import Kernel
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype, spread
from inl_torch.triton.lora.kernels import lora_expand, lora_shrink
from inl_torch.triton.matmul.activation import refuse_activation
from inl_torch.triton.tuning import Tuning

COLUMNS: Final = 16
"""Columns of a tile of A, the fewest of the matrix units."""

SPLIT: Final = 2048
"""Elements of the input of a program. Splits depend on nothing else, so that a token's
result has the same bits in any batch."""

STEP, STEP_FLOAT32 = 128, 64
"""Elements of the input that a loop step multiplies."""

MOST_TOKENS: Final = 32
"""Tokens of a tile. All tiles use the same matrix instruction."""


class _Tile(NamedTuple):
    """Tile of B."""

    rows: int
    columns: int
    warps: int


FEW, FEW_GATED = _Tile(32, 128, 4), _Tile(32, 128, 8)
"""Of one tile of tokens: small, so that there are many programs."""

MANY = _Tile(64, 64, 8)

FLOAT32 = _Tile(32, 32, 8)


def token_tile(tokens: int) -> int:
    """Return the tokens of a tile."""
    return min(max(power(tokens), 16), MOST_TOKENS)


def shrink(
    x: torch.Tensor, matrices: Sequence[torch.Tensor], selected: torch.Tensor,
    rank: int, tuning: Tuning, step: int,
) -> torch.Tensor:  # fmt: skip
    """Return ``A(x)`` of one to three layers: float32 [splits, layers, T, rank].

    Columns that their token does not select are undefined. step: elements of ``x`` at a
    time.
    """
    (tokens, k), columns, layers = x.shape, selected.shape[1], len(matrices)
    splits, tile = -(-k // SPLIT), token_tile(tokens)
    inner = torch.empty(
        (splits, layers, tokens, rank), dtype=torch.float32, device=x.device
    )
    lora_shrink[(-(-tokens // tile), layers * -(-columns // COLUMNS), splits)](
        x, *matrices, *[matrices[0]] * (3 - layers), selected, inner, x.stride(0),
        tokens, K=k, C=columns, RANK=rank, SPLIT=min(SPLIT, max(power(k), step)),
        TOKENS=tile, COLUMNS=COLUMNS, STEP=step,
        PDL=tuning.uses_pdl(tokens), num_warps=spread(4, x), **tuning.launch(tokens),
    )  # fmt: skip
    return inner


def add(
    ys: Sequence[torch.Tensor], x: torch.Tensor, loras: Sequence[Lora],
    selected: torch.Tensor, rank: int, tuning: Tuning, activation: str = "",
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return ``y + B(selected * A(x))`` of each layer, or the activation of two.

    Without an activation the results are ``ys``, which are overwritten.
    """
    ys, x, selected = [dense(y) for y in ys], dense(x), selected.contiguous()
    tokens, columns, layers = x.shape[0], selected.shape[1], len(ys)
    tile = token_tile(tokens)
    token_tiles = -(-tokens // tile)
    is_float32 = x.dtype == torch.float32
    step, matrices = STEP_FLOAT32 if is_float32 else STEP, [lora.a for lora in loras]
    inner = shrink(x, matrices, selected, rank, tuning, step)
    options = {"PDL": tuning.uses_pdl(tokens), **tuning.launch(tokens)}
    first, second, third = (*loras, *[loras[0]] * (3 - layers))
    z = ys[0]
    if activation:
        z = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    y_all = [*ys, *[ys[0]] * (3 - layers)]
    rows, most, warps = FEW_GATED if activation else FEW
    if is_float32 or token_tiles > 1:
        rows, most, warps = FLOAT32 if is_float32 else MANY
    stored = ys[:1] if activation else ys
    outputs = sum(-(-y.shape[1] // rows) for y in stored)
    lora_expand[(token_tiles, outputs)](
        *y_all, first.b, second.b, third.b, z, selected, inner,
        *(y.stride(0) for y in y_all), *(y.shape[1] for y in y_all), tokens, C=columns,
        RANK=rank, RANK_P=max(power(rank), 16), LAYERS=layers, SPLITS=inner.shape[0],
        GATED=bool(activation), SILU=activation == "silu", TOKENS=tile, ROWS=rows,
        COLUMNS=min(max(power(columns), 16), most), num_warps=spread(warps, x),
        **options,
    )  # fmt: skip
    return (z,) if activation else tuple(ys)


def lora(
    y: torch.Tensor, x: torch.Tensor, w: Lora, selected: torch.Tensor, *, rank: int,
    tuning: Tuning,
) -> torch.Tensor:  # fmt: skip
    return add([y], x, [w], selected, rank, tuning)[0]


def qkv_lora(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor, w: QkvLora,
    selected: torch.Tensor, *, rank: int, tuning: Tuning,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    loras = [Lora(w.q_a, w.q_b), Lora(w.k_a, w.k_b), Lora(w.v_a, w.v_b)]
    return add([q, k, v], x, loras, selected, rank, tuning)


def gated_lora(
    gate: torch.Tensor, up: torch.Tensor, x: torch.Tensor, w: GatedLora,
    selected: torch.Tensor, *, rank: int, activation: str, tuning: Tuning,
) -> torch.Tensor:  # fmt: skip
    loras = [Lora(w.gate_a, w.gate_b), Lora(w.up_a, w.up_b)]
    return add([gate, up], x, loras, selected, rank, tuning, activation)[0]


def _refuse(y: Any, *_: Any, activation: str = "silu", **_attrs: Any) -> str | None:
    return refuse_activation(activation) or refuse_dtype(y)


def kernels(tuning: Tuning) -> Iterable[Kernel]:
    """Return the kernels of adapters."""
    for run in (lora, qkv_lora, gated_lora):
        yield Kernel(
            run.__name__,
            "triton",
            partial(run, tuning=tuning),
            refuse=_refuse,
            invariant=True,
            preference=PREFERENCE,
        )

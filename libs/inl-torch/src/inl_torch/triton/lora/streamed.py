"""Products of a few rows with adapters: the base matrix is read once, and the terms of
adapters are added before the result is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch

from inl.ops.linear import Linear
from inl.ops.lora import GatedLora, Lora, QkvLora
from inl.spec.kernel import PLAIN, Kernel
from inl.spec.selection import layout_of
from inl_torch.eager.linear import QKV, StackedQkv, can_stack_qkv, stack_qkv
from inl_torch.triton.attention.rope_attend import WIDE
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype
from inl_torch.triton.counters import Counters
from inl_torch.triton.lora.streamed_kernels import adapted_product
from inl_torch.triton.matmul.activation import refuse_activation
from inl_torch.triton.matmul.products import is_wide
from inl_torch.triton.matmul.streamed import stream_tile
from inl_torch.triton.tuning import Tuning, padded_rows

COLUMNS: Final = 128
"""Most columns of B that a program loads at once."""

DIVISOR: Final = 64
"""Divisor of the outputs of stacked layers: no tile has rows of two layers."""


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    loras: Sequence[Lora], selected: torch.Tensor, tuning: Tuning, counters: Counters,
    *, up: torch.Tensor | None = None, activation: str = "",
) -> torch.Tensor:  # fmt: skip
    """Return ``x`` [T, K] @ ``weight`` [N, K].T + ``bias`` with adapters: [T, N].

    loras: one, or three whose outputs are stacked in ``weight``, or those of ``weight``
    and ``up``; the result is then ``activation(weight(x)) * up(x)``.
    """
    x, selected = dense(x), selected.contiguous()
    (tokens, k), n, columns = x.shape, weight.shape[0], selected.shape[1]
    layers, gated = len(loras), up is not None
    first, second, third = (*loras, *[loras[0]] * (3 - layers))
    y = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    inner = torch.empty((layers, tokens, columns), dtype=x.dtype, device=x.device)
    padded = padded_rows(tokens)
    tile = stream_tile(n, padded, gated=gated)
    tiles = -(-columns // tile.rows)
    programs = (tiles if gated else tiles * layers) + -(-n // tile.rows)
    adapted_product[(programs,)](
        x, weight, weight if up is None else up, weight if bias is None else bias, y,
        first.a, second.a, third.a, first.b, second.b, third.b, selected, inner,
        counters.on(x.device, programs), x.stride(0), tokens, n, k, first.b.shape[0],
        second.b.shape[0], C=columns, LAYERS=layers, TOKENS=padded, ROWS=tile.rows,
        COLUMNS=tile.columns, B_COLUMNS=min(max(power(columns), 16), COLUMNS),
        STAGES=tile.fitted_stages(padded, tuning, gated=gated),
        EVEN=n % tile.rows == 0 and k % tile.columns == 0,
        EVEN_INPUTS=k % tile.columns == 0, HAS_BIAS=bias is not None, GATED=gated,
        SILU=activation == "silu", WAITS=tuning.lanes == WIDE,
        PDL=tuning.uses_pdl(tokens), num_warps=tile.warps, **tuning.launch(tokens),
    )  # fmt: skip
    return y


def adapted_linear(
    x: torch.Tensor, w: Linear, loras: Lora, selected: torch.Tensor, *,
    rank: int,  # noqa: ARG001 - as the op
    tuning: Tuning, counters: Counters,
) -> torch.Tensor:  # fmt: skip
    return product(x, w.weight, w.bias, [loras], selected, tuning, counters)


def adapted_qkv_linear(
    x: torch.Tensor, w: StackedQkv, loras: QkvLora, selected: torch.Tensor, *,
    rank: int,  # noqa: ARG001 - as the op
    tuning: Tuning, counters: Counters,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    pairs = [Lora(*loras[at : at + 2]) for at in (0, 2, 4)]
    y = product(x, w.weight, w.bias, pairs, selected, tuning, counters)
    return y.split_with_sizes([pair.b.shape[0] for pair in pairs], 1)


def adapted_gate_up(
    x: torch.Tensor, gate: Linear, up: Linear, w: GatedLora, selected: torch.Tensor, *,
    rank: int,  # noqa: ARG001 - as the op
    activation: str, tuning: Tuning, counters: Counters,
) -> torch.Tensor:  # fmt: skip
    pairs = [Lora(w.gate_a, w.gate_b), Lora(w.up_a, w.up_b)]
    return product(
        x, gate.weight, None, pairs, selected, tuning, counters, up=up.weight,
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
    counters = Counters()
    runs = (adapted_linear, _refuse), (adapted_gate_up, _refuse_gate_up)
    for run, refuse in runs:
        yield Kernel(
            run.__name__,
            "triton",
            partial(run, tuning=tuning, counters=counters),
            refuse=partial(refuse, tuning=tuning),
            preference=PREFERENCE,
        )
    yield Kernel(
        "adapted_qkv_linear",
        "triton",
        partial(adapted_qkv_linear, tuning=tuning, counters=counters),
        refuse=partial(_refuse_qkv, tuning=tuning),
        layout=QKV,
        pack=stack_qkv,
        can_pack=can_stack_qkv,
        preference=PREFERENCE,
    )

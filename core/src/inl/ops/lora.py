"""Low-rank adapters (Hu et al., 2021) of linear layers, several in one batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.ops.linear import Linear, product_flops
from inl.spec.kernel import PLAIN
from inl.spec.op import Case, elements, op
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

SIZES = ((1, 8, 16, 1, 2), (2, 5, 3, 2, 1), (13, 64, 48, 3, 4), (33, 96, 160, 2, 8))
"""(tokens, outputs, inputs, adapters, rank) of the cases."""


class Lora(NamedTuple):
    """Parameters of :data:`lora`: the matrices of all adapters of a layer, stacked.

    ``C`` is the number of adapters times their maximum rank. An adapter of a lower rank
    has zeros in its remaining rows and columns, and one without this layer has only
    zeros.
    """

    a: Array
    """[C, K]: row ``i * rank + j`` is row j of matrix A of adapter i."""
    b: Array
    """[N, C]: columns in the same order, of matrices B times their scale."""

    @property
    def layout(self) -> str:
        """Layout of unpacked weights."""
        return PLAIN


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, n, k, adapters, rank in SIZES:
        x, y = rng.standard_normal((tokens, k)), rng.standard_normal((tokens, n))
        columns = adapters * rank
        w = Lora(rng.standard_normal((columns, k)), rng.standard_normal((n, columns)))
        chosen = rng.integers(-1, adapters, tokens)  # -1 is none
        selected = chosen[:, None] == np.arange(columns) // rank
        args = (y, x, w, selected.astype(np.float64))
        yield Case(f"{tokens}x{n}x{k}/{adapters}x{rank}", args, {"rank": rank})


def _flops(y: Any, x: Any, w: Any, selected: Any, **_: Any) -> int:
    return product_flops(x, w) + elements(selected) + elements(y)


@op(cases=_cases, weights=Lora, flops=_flops)
def lora(ops: Ops, y: Array, x: Array, w: Lora, selected: Array, *, rank: int) -> Array:
    """Add the adapters' terms to a linear layer: ``y + B(selected * A(x))``.

    y: [T, N], the layer's result. x: [T, K], its input. selected: [T, C] in the compute
    dtype, 1 in the ``rank`` columns of the token's adapter and 0 in all others; all 0
    for a token without one. Returns [T, N]; on several ranks a partial sum where ``y``
    is one.

    The body multiplies with the matrices of all adapters. A grouped kernel may read
    only those that tokens select.
    """
    assert selected.shape[-1] % rank == 0, "whole adapters"
    inner = ops.linear(x, Linear(w.a)) * selected
    return y + ops.linear(inner, Linear(w.b))

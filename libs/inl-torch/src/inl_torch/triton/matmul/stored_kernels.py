"""Kernels of the ops over weights that are streamed as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch

from inl.ops.linear import Linear, QkvLinear
from inl.ops.norm import Norm
from inl.spec.kernel import Kernel
from inl_torch.eager.linear import StackedQkv
from inl_torch.eager.mlp import StackedMlp
from inl_torch.triton.common import PREFERENCE, dtype_name, refuse_dtype
from inl_torch.triton.matmul.activation import refuse_activation
from inl_torch.triton.matmul.stored import Refuse, Stack, is_decoded, packers

OTHERS: Final = "other kernels"

ORDER: Final = ("cuda", "triton", "eager")
"""Technologies in the order in which names list them."""


class MatrixSize(NamedTuple):
    """What is known of a matrix [N, K] before it is loaded."""

    rows: int
    columns: int
    is_decoded: bool = False
    """Whether it is :class:`~inl_torch.triton.matmul.stored.Plain`."""


class StoredProducts(Protocol):
    """Products with the matrices of one layout."""

    def technologies(
        self, x: Any, matrix: MatrixSize, down: MatrixSize | None = None
    ) -> set[str]:
        """Return what computes rows like ``x`` times a matrix.

        down: second matrix of a feed-forward layer. Empty where the products do not
        support the call.
        """

    def product(
        self, x: torch.Tensor, w: Any, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``x`` [T, K] @ ``w`` [N, K].T + ``bias`` [N]: [T, N]."""

    def norm_product(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm, eps: float,
        w: Any, bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return ``residual + delta`` [T, K], and the product of its norm: [T, N]."""

    def mlp(self, x: torch.Tensor, w: StackedMlp, activation: str) -> torch.Tensor:
        """Return the feed-forward layer of ``x`` [T, K]."""

    def norm_mlp(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm, eps: float,
        w: StackedMlp, activation: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return ``residual + delta`` [T, K], and the layer of its norm."""

    def refuse_norm(self, residual: Any, matrix: MatrixSize, /) -> str | None:
        """Refuse rows whose norm and product are better computed apart."""


def linear(x: torch.Tensor, w: Linear, *, products: StoredProducts) -> torch.Tensor:
    return products.product(x, w.weight, w.bias)


def qkv_linear(
    x: torch.Tensor, w: StackedQkv, *, products: StoredProducts
) -> tuple[torch.Tensor, ...]:
    return _split(products.product(x, w.weight, w.bias), w)


def _split(y: torch.Tensor, w: StackedQkv) -> tuple[torch.Tensor, ...]:
    keys = w.keys.shape[0]
    return y.split_with_sizes((y.shape[1] - 2 * keys, keys, keys), 1)


def gated_mlp(
    x: torch.Tensor, w: StackedMlp, *, activation: str, products: StoredProducts
) -> torch.Tensor:
    return products.mlp(x, w, activation)


def norm_qkv(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, w: StackedQkv, *,
    eps: float, products: StoredProducts,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    summed, y = products.norm_product(residual, delta, norm, eps, w.weight, w.bias)
    return summed, *_split(y, w)


def norm_mlp(
    residual: torch.Tensor, delta: torch.Tensor, norm: Norm, w: StackedMlp, *,
    eps: float, activation: str, products: StoredProducts,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return products.norm_mlp(residual, delta, norm, eps, w, activation)


def size_of(spec: Any) -> MatrixSize:
    rows, columns = spec.shape
    return MatrixSize(rows, columns, is_decoded(spec))


def sizes(w: Any) -> tuple[MatrixSize, ...]:
    """Return the sizes of the matrices of a group of weights, as they are stored."""
    if isinstance(w, Linear):
        return (size_of(w.weight),)
    if isinstance(w, QkvLinear):
        rows = sum(part.shape[0] for part in (w.q, w.k, w.v))
        return (MatrixSize(rows, w.q.shape[1]),)
    inner, hidden = w.gate.shape
    return MatrixSize(2 * inner, hidden), size_of(w.down)


def joined_name(technologies: Iterable[str]) -> str:
    """Return the beginning of a kernel's name: "cuda+triton"."""
    return "+".join(sorted(technologies, key=ORDER.index))


def stored_kernels(
    suffix: str, product_names: Sequence[str], layer_names: Sequence[str],
    layout: str, refuse_stored: Refuse, stack: Stack, products: StoredProducts,
    **more: Any,
) -> Iterable[Kernel]:  # fmt: skip
    """Return the kernels of a layout: see :class:`StoredProducts`.

    They are named by what computes them and ``suffix``: products by one of
    ``product_names``, feed-forward layers by one of ``layer_names``. refuse_stored: why
    the parts of a group of weights cannot be packed. stack: packs matrices. more:
    fields of the kernels.
    """
    groups = packers(layout, refuse_stored, stack)

    def refuse(
        x: Any, *rest: Any, name: str, activation: str = "silu", **_: Any
    ) -> str | None:
        reason = refuse_activation(activation) or refuse_dtype(x)
        found = joined_name(products.technologies(x, *sizes(rest[-1])))
        if reason is None and found != name:
            rows, dtype = x.shape[0], dtype_name(x)
            reason = f"{rows} rows in {dtype} are computed by {found or OTHERS}"
        return reason

    def refuse_norm(residual: Any, *rest: Any, **attrs: Any) -> str | None:
        reason = products.refuse_norm(residual, sizes(rest[-1])[0])
        return reason or refuse(residual, *rest, **attrs)

    def kernel(
        op: str, name: str, run: Callable[..., Any], refuse: Callable[..., Any],
        group: str = "",
    ) -> Kernel:  # fmt: skip
        pack, can_pack = groups[group or op]
        options = {"preference": PREFERENCE + 2, **more}
        return Kernel(
            op,
            f"{name}_{suffix}",
            partial(run, products=products),
            refuse=partial(refuse, name=name),
            layout=layout,
            pack=pack,
            can_pack=can_pack,
            **options,
        )

    for name in product_names:
        yield kernel("linear", name, linear, refuse)
        yield kernel("qkv_linear", name, qkv_linear, refuse)
        if name != "eager":  # the norm is not torch's
            yield kernel("norm_qkv", name, norm_qkv, refuse_norm, "qkv_linear")
    for name in layer_names:
        yield kernel("gated_mlp", name, gated_mlp, refuse)
        yield kernel("norm_mlp", name, norm_mlp, refuse_norm, "gated_mlp")

"""Ops over stored weights for one row of activations, in CUDA C++.

What the kernels do not multiply is left to those of several rows: matrices in narrow
groups, which only loaded scales show, and down projections of other sizes.
"""

from __future__ import annotations

from typing import Any

import torch

from inl.ops.norm import Norm
from inl_cuda.one_row.products import OneRowProducts
from inl_torch.eager.mlp import StackedMlp
from inl_torch.triton.matmul.stored import Matrix
from inl_torch.triton.matmul.stored_kernels import MatrixSize, StoredProducts


class OneRowFirst:
    """:class:`StoredProducts` of one row.

    products: those of Triton. is_int4: whether matrices have 4 bits, not 8. pdl:
    whether kernels may start before the previous one ends.
    """

    def __init__(
        self, products: StoredProducts, one_row: OneRowProducts, *, is_int4: bool,
        pdl: bool,
    ) -> None:  # fmt: skip
        self.products, self.one_row = products, one_row
        self.is_int4, self.pdl = is_int4, pdl

    def technologies(
        self, x: Any, matrix: MatrixSize, down: MatrixSize | None = None
    ) -> set[str]:
        """Return what computes a product, or a feed-forward layer."""
        if not self._fits(x, matrix):
            return set()
        found = {"cuda", "triton"} if self.is_int4 else {"cuda"}
        if down is None or self._fits(x, down):
            return found
        return found | self.products.technologies(x, down)

    def _fits(self, x: Any, size: MatrixSize) -> bool:
        return not size.is_decoded and self.one_row.fits(
            x, size.rows, size.columns, is_int4=self.is_int4
        )

    def product(
        self, x: torch.Tensor, w: Matrix, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``x`` [T, K] @ ``w`` [N, K].T + ``bias`` [N]: [T, N]."""
        if self.one_row.takes(x, w):
            return self.one_row.multiply(x, w, bias, pdl=self.pdl)
        return self.products.product(x, w, bias)

    def norm_product(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm, eps: float,
        w: Matrix, bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return ``residual + delta`` [T, K], and the product of its norm: [T, N]."""
        if self.one_row.takes(residual, w):
            return self.one_row.norm_multiply(
                residual, delta, norm, eps, w, bias, pdl=self.pdl
            )
        return self.products.norm_product(residual, delta, norm, eps, w, bias)

    def mlp(self, x: torch.Tensor, w: StackedMlp, activation: str) -> torch.Tensor:
        """Return the feed-forward layer of ``x`` [T, K]."""
        if self.one_row.takes(x, w.gate_up):
            inner = self.one_row.multiply(
                x, w.gate_up, None, gated=activation, pdl=self.pdl
            )
            return self.product(inner, w.down, None)
        return self.products.mlp(x, w, activation)

    def norm_mlp(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm, eps: float,
        w: StackedMlp, activation: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return ``residual + delta`` [T, K], and the layer of its norm."""
        if self.one_row.takes(residual, w.gate_up):
            summed, inner = self.one_row.norm_multiply(
                residual, delta, norm, eps, w.gate_up, None, gated=activation,
                pdl=self.pdl,
            )  # fmt: skip
            return summed, self.product(inner, w.down, None)
        return self.products.norm_mlp(residual, delta, norm, eps, w, activation)

    def refuse_norm(self, residual: Any, matrix: MatrixSize) -> str | None:
        """Refuse rows whose norm and product are better computed apart."""
        return self.products.refuse_norm(residual, matrix)

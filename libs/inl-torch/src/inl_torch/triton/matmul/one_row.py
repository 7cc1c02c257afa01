"""Products of one row by other kernels than those of several rows."""

from __future__ import annotations

from typing import Any

import torch

from inl.ops.norm import Norm
from inl_torch.eager.mlp import StackedMlp
from inl_torch.triton.matmul.stored import Matrix
from inl_torch.triton.matmul.stored_kernels import StoredProducts
from inl_torch.triton.one_row import OneRowProducts


class OneRowFirst:
    """:class:`StoredProducts` of which those of one row are computed apart."""

    def __init__(self, products: StoredProducts, one_row: OneRowProducts) -> None:
        self.tuning = products.tuning
        self.products, self.one_row = products, one_row
        self.pdl = self.tuning.uses_pdl(1)

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

    def refuse_norm(self, residual: Any) -> str | None:
        """Refuse rows whose norm and product are better computed apart."""
        return self.products.refuse_norm(residual)


def one_row_first(products: StoredProducts) -> StoredProducts:
    """Return products of which those of one row use the chip's kernels of one row."""
    kernels = products.tuning.one_row
    return products if kernels is None else OneRowFirst(products, kernels.products)

"""Kernels of steps of one row, which a backend may provide beside those of Triton."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from inl.ops.norm import Norm
from inl.spec.cache import Cache
from inl.spec.step import Step
from inl_torch.triton.matmul.stored import Matrix


class OneRowProducts(Protocol):
    """Products of one row of activations with stored matrices."""

    def takes(self, x: torch.Tensor, w: Matrix) -> bool:
        """Whether rows [T, K] multiply a matrix [N, K] here."""

    def multiply(
        self, x: torch.Tensor, w: Matrix, bias: torch.Tensor | None, *, gated: str = "",
        pdl: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``x`` [1, K] @ ``w`` [N, K].T + ``bias`` [N]: [1, N].

        gated: activation of the first half of the matrix's rows, by which the second
        half is multiplied; the result is then [1, N / 2]. pdl: whether the kernel may
        start before the previous one ends, which must not write the weights.
        """

    def norm_multiply(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm, eps: float,
        w: Matrix, bias: torch.Tensor | None, *, gated: str = "", pdl: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return ``residual + delta`` [1, K], and the product of its norm."""


class OneRowAttention(Protocol):
    """Attention of one token."""

    def takes(self, q: torch.Tensor, cache: Cache) -> bool:
        """Whether queries [T, heads, d] attend to a cache here."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
        sin: torch.Tensor, cache: Cache, step: Step, *, scale: float,
        window: int | None, cap: float | None, group: int, pdl: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Rotate, write to the cache and attend: [1, heads, d].

        Heads of a token are adjacent. The previous kernel must not write the arrays of
        the step, nor the cache, if ``pdl``.
        """


class OneRowKernels(NamedTuple):
    """Kernels of steps of one row."""

    products: OneRowProducts
    attention: OneRowAttention

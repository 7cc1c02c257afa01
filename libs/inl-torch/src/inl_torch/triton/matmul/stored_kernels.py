"""Kernels of the ops over weights that are streamed as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch

from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_torch.eager.linear import StackedQkv
from inl_torch.eager.mlp import StackedMlp
from inl_torch.triton.attention.rope_attend import decode_attention, plan
from inl_torch.triton.common import PREFERENCE, refuse_dtype
from inl_torch.triton.matmul.activation import refuse_activation
from inl_torch.triton.matmul.fused import refuse_attend
from inl_torch.triton.matmul.stored import (
    Refuse,
    Stack,
    packers,
)
from inl_torch.triton.tuning import Tuning


class StoredProducts(Protocol):
    """Products with the matrices of one layout."""

    tuning: Tuning

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

    def refuse_norm(self, residual: Any) -> str | None:
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


def attend_project(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, cache: Cache, step: Step, w: Linear, *, scale: float,
    window: int | None = None, cap: float | None = None, group: int = 0,
    products: StoredProducts, name: str,
) -> tuple[torch.Tensor, Cache]:  # fmt: skip
    out = decode_attention(
        q, k, v, cos, sin, cache, step, scale=scale, window=window, cap=cap,
        group=group, tuning=products.tuning, label=f"attend_project/{name}",
    )  # fmt: skip
    return products.product(out.view(q.shape[0], -1), w.weight, w.bias), cache


def refuse(x: Any, *_: Any, **__: Any) -> str | None:
    """Refuse unsupported dtypes."""
    return refuse_dtype(x)


def _refuse_mlp(x: Any, *_: Any, activation: str, **__: Any) -> str | None:
    return refuse_activation(activation) or refuse(x)


def stored_kernels(
    name: str, layout: str, refuse_stored: Refuse, stack: Stack,
    products: StoredProducts, **more: Any,
) -> Iterable[Kernel]:  # fmt: skip
    """Return the kernels of a layout: see :class:`StoredProducts`.

    refuse_stored: why the parts of a group of weights cannot be packed. stack: packs
    matrices. more: fields of the kernels.
    """
    groups = packers(layout, refuse_stored, stack)

    def refuse_norm(residual: Any, *_: Any, **__: Any) -> str | None:
        return products.refuse_norm(residual) or refuse(residual)

    def refuse_norm_mlp(residual: Any, *_: Any, activation: str, **__: Any) -> Any:
        return refuse_activation(activation) or refuse_norm(residual)

    def kernel(
        op: str, run: Callable[..., Any], refuse: Callable[..., Any], group: str = "",
        **plan: Any,
    ) -> Kernel:  # fmt: skip
        pack, can_pack = groups[group or op]
        return Kernel(
            op,
            name,
            partial(run, products=products),
            refuse=refuse,
            layout=layout,
            pack=pack,
            can_pack=can_pack,
            preference=PREFERENCE + 2,
            **more,
            **plan,
        )

    yield kernel("linear", linear, refuse)
    yield kernel("qkv_linear", qkv_linear, refuse)
    yield kernel("gated_mlp", gated_mlp, _refuse_mlp)
    yield kernel("norm_qkv", norm_qkv, refuse_norm, "qkv_linear")
    yield kernel("norm_mlp", norm_mlp, refuse_norm_mlp, "gated_mlp")
    attend = partial(refuse_attend, tuning=products.tuning)
    run = partial(attend_project, name=name)
    yield kernel("attend_project", run, attend, "linear", plan=plan)

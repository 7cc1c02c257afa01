"""Kernels as objects that hold their settings."""

from __future__ import annotations

from typing import Any, final

from inl_toolkit.kernels.attention import flash_attention
from inl_toolkit.kernels.config import make_config
from inl_toolkit.kernels.decorators import DecoratedKernel
from inl_toolkit.kernels.dense import gemm, layer_norm


def _on_tpu(owner: object, function: Any, settings: Any) -> DecoratedKernel:
    config = make_config(type(owner).__name__, None, settings)
    return DecoratedKernel(function, ("tpu",), config)


@final
class TPUGEMMKernel:
    """:func:`~inl.kernels.gemm` on a TPU, as :func:`~inl.kernels.tpu_kernel` runs it.

    settings: fields of :class:`~inl.kernels.KernelConfig`.
    """

    def __init__(self, **settings: Any) -> None:
        self.kernel = _on_tpu(self, gemm, settings)

    def __call__(self, a: Any, b: Any) -> Any:
        """Return the product of ``a`` [..., M, K] and ``b`` [K, N]."""
        return self.kernel(a, b)


@final
class TPUAttentionKernel:
    """:func:`~inl.kernels.flash_attention` on a TPU.

    use_flash: by tiles. causal, window, block_mask, scale: as there. settings: fields
    of :class:`~inl.kernels.KernelConfig`.
    """

    def __init__(
        self,
        *,
        use_flash: bool = True,
        causal: bool = False,
        window: int | None = None,
        block_mask: Any = None,
        scale: float | None = None,
        **settings: Any,
    ) -> None:
        def attention(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
            return flash_attention(
                query, key, value, mask=mask, causal=causal, window=window,
                block_mask=block_mask, scale=scale,
            )  # fmt: skip

        self.kernel = _on_tpu(
            self, attention, {"use_efficient_attention": use_flash, **settings}
        )

    def __call__(self, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        """Return the attention of ``query`` [..., L, d], [..., L, e]."""
        return self.kernel(query, key, value, mask)


@final
class TPULayerNormKernel:
    """:func:`~inl.kernels.layer_norm` on a TPU."""

    def __init__(self, *, eps: float = 1e-5, **settings: Any) -> None:
        def normalize(x: Any, scale: Any = None, bias: Any = None) -> Any:
            return layer_norm(x, scale, bias, eps=eps)

        self.kernel = _on_tpu(self, normalize, settings)

    def __call__(self, x: Any, scale: Any = None, bias: Any = None) -> Any:
        """Normalize ``x`` [..., H]."""
        return self.kernel(x, scale, bias)

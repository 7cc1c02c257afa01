"""Rotary position embeddings (Su et al., 2021) with a table of cosines and sines."""

from __future__ import annotations

from typing import Any

import numpy as np

from inl.errors import KernelError
from inl.spec.explained import report
from inl_toolkit.functional.arrays import cast, dtype_name, like, module_of
from inl_toolkit.functional.out_of_memory import translating
from inl_toolkit.kernels.dense import widened
from inl_toolkit.kernels.operands import check_arrays, check_number, check_size
from inl_toolkit.kernels.profile import recorded


@translating
def create_rope_cache(
    length: int, dim: int, *, theta: float = 10000.0, array: Any = None
) -> tuple[Any, Any]:
    """Return cosines and sines of positions 0 to ``length - 1``.

    Two of float32 [length, dim / 2], computed in float64. array: an array whose
    framework and device they get; NumPy by default. Raises
    :class:`~inl.errors.KernelError` for an odd ``dim``.
    """
    check_size("create_rope_cache", "length", length, 0)
    check_size("create_rope_cache", "dim", dim)
    check_number("create_rope_cache", "theta", theta, 0)
    if dim % 2:
        raise KernelError(
            f"create_rope_cache: found length {length} and dim {dim}, accepted: 0 or "
            "more, and an even number"
        )
    rates = theta ** (-np.arange(0, dim, 2) / dim)
    angles = np.arange(length)[:, None] * rates
    tables = [t.astype(np.float32) for t in (np.cos(angles), np.sin(angles))]
    cos, sin = tables if array is None else [like(t, array) for t in tables]
    return cos, sin


@translating
def apply_rope(x: Any, cos: Any, sin: Any) -> Any:
    """Rotate ``x`` [..., L, d] by the first L rows of a cache [length, d / 2].

    Pairs are element i and i + d / 2, as in Llama. Computed in float32. Raises
    :class:`~inl.errors.KernelError` for a cache that is too short or of another width.
    """
    framework = check_arrays("apply_rope", x=x, cos=cos, sin=sin)
    length, half = x.shape[-2], x.shape[-1] // 2
    if cos.shape[0] < length or cos.shape[-1] != half or x.shape[-1] % 2:
        raise KernelError(
            f"apply_rope: found {list(x.shape)} and a cache {list(cos.shape)}, "
            "accepted: [..., L, d] and at least L rows of d / 2"
        )
    xp = module_of("apply_rope", "x", x)

    def run() -> Any:
        wide, c, s = widened(x), cos[:length], sin[:length]
        a, b = wide[..., :half], wide[..., half:]
        y = xp.concatenate([a * c - b * s, b * c + a * s], axis=-1)
        return cast(y, x.dtype)

    report(f"rope/{framework} formula", f"{dtype_name(widened(x[:0]))}")
    return recorded("rope", x, run)

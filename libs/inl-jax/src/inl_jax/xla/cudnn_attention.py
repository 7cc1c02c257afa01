"""Attention by the fused kernel of cuDNN, on NVIDIA GPUs.

The kernel of JAX has one derivative in reverse mode only; derivatives here are those of
the tiles, in every mode and any number of times.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Literal

import jax
import jax.numpy as jnp

from inl.spec.attention_pattern import AttentionPattern
from inl_jax.tensors import Array

LIBRARY: Literal["cudnn", "xla"] = "cudnn"
"""As ``jax.nn.dot_product_attention`` names it."""

LARGEST_HEAD = 128
"""Largest size of a head that the kernel has on every GPU."""

log = logging.getLogger("inl.kernels")


def why_not(
    q: Array,
    v: Array,
    pattern: AttentionPattern,
    mask: Array | None,
    scale: float | Array,
    precision: str | None,
) -> str:
    """Return why the kernel does not compute an attention, "" if it does.

    Operands are as of :func:`attend`.
    """
    width, keys = q.shape[-1], pattern.keys
    reasons = {
        "not of a half type": q.dtype not in (jnp.bfloat16, jnp.float16),
        "a mask": mask is not None or pattern.blocks is not None,
        "a scale that is an array": isinstance(scale, jax.Array),
        "a precision": precision is not None,
        "sizes of heads": width % 8 or width > LARGEST_HEAD or v.shape[-1] != width,
        "causal, and queries that are not as many as keys": pattern.causal
        and pattern.length != keys,
        "a window that is not causal": pattern.window is not None
        and not pattern.causal,
        "one query or key": min(pattern.length, keys) < 2,
        "not on a GPU": not on_gpu(q),
    }
    found = [name for name, is_so in reasons.items() if is_so]
    return found[0] if found else missing()


def on_gpu(x: Array) -> bool:
    """Whether an array is on a GPU, or will be where a program is traced."""
    if not isinstance(x, jax.core.Tracer):
        return all(each.platform == "gpu" for each in x.devices())
    chosen = getattr(jax.config, "jax_default_device", None)
    platform = getattr(chosen, "platform", chosen) or jax.default_backend()
    return platform in ("gpu", "cuda")


@cache
def missing() -> str:
    """Return why the device lacks the kernel, "" if it does not; compiles a program."""
    if jax.default_backend() != "gpu":
        return f"not on {jax.default_backend()}"
    x = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    call = partial(_fused, scale=1.0, causal=True, window=None)
    try:
        jax.jit(call).lower(x, x, x).compile()
    except Exception as error:
        reason = str(error).partition("\n")[0][:200]
        log.warning(
            "flash_attention: cuDNN has no attention here: %s; computed by tiles",
            reason,
        )
        return f"no cuDNN: {reason}"
    return ""


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def attend(
    q: Array, k: Array, v: Array, pattern: AttentionPattern, scale: float
) -> Array:
    """Attention of queries [..., L, d] to keys and values [..., S, d].

    Of grouped queries [..., G, H / G, L, d], keys and values are [..., G, 1, S, d].
    """
    shape, groups = q.shape, k.shape
    is_grouped = q.shape[:-2] != k.shape[:-2]
    axes = 5 if is_grouped else 4
    q, k, v = (x.reshape(*(1,) * max(axes - x.ndim, 0), *x.shape) for x in (q, k, v))
    heads = (q.shape[-4] * q.shape[-3], k.shape[-4]) if is_grouped else q.shape[-3:-2]
    x, y, z = (
        jnp.swapaxes(each.reshape(-1, count, *each.shape[-2:]), 1, 2)
        for each, count in ((q, heads[0]), (k, heads[-1]), (v, heads[-1]))
    )
    window = pattern.window
    if window is not None and window >= groups[-2]:
        window = None
    result = _fused(x, y, z, scale=scale, causal=pattern.causal, window=window)
    return jnp.swapaxes(result, 1, 2).reshape(shape)


def _fused(
    q: Array, k: Array, v: Array, *, scale: float, causal: bool, window: int | None
) -> Array:
    """Attention of [B, L, H, d] to [B, S, G, d]."""
    size = None if window is None else (window - 1, 0)
    found: Array = jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=causal, local_window_size=size,
        implementation=LIBRARY,
    )  # fmt: skip
    return found


@attend.defjvp
def _slope(
    pattern: AttentionPattern,
    scale: float,
    primals: tuple[Array, Array, Array],
    tangents: tuple[Array, Array, Array],
) -> tuple[Array, Array]:
    from inl_jax.xla.tiled_attention import attend_by_tiles

    def tiles(q: Array, k: Array, v: Array) -> Array:
        return attend_by_tiles(q, k, v, pattern, None, scale, None).astype(q.dtype)

    result: tuple[Array, Array] = jax.jvp(tiles, primals, tangents)
    return result

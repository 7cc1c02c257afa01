"""Conversion between host arrays and JAX arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inl.dtypes import SIZES, HostArray, wrap
from inl.errors import DeviceError

Array = jax.Array

BITS = jnp.uint16
"""Dtype of bfloat16 caches on CPUs: XLA converts all of a cache of bfloat16 to float32
and back to write to it there. No other array has it."""


def accumulated(*operands: Any) -> Any:
    """Return the dtype of sums of products: float32, or that of wider operands."""
    return jnp.promote_types(jnp.result_type(*operands), jnp.float32)


def einsum(form: str, *operands: Any) -> Array:
    """Products accumulated in float32 or wider.

    Those of float32 have float32 precision on every device, including those that use a
    lower precision by default.
    """
    return jnp.einsum(
        form, *operands, precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=accumulated(*operands),
    )  # fmt: skip


def jax_dtype(name: str) -> Any:
    """Return the JAX dtype of a name; raises :class:`DeviceError` if unknown."""
    if name not in SIZES:
        raise DeviceError(f"dtype: found {name!r}, JAX takes {', '.join(SIZES)}")
    return jnp.dtype(name)


def from_host(array: HostArray, device: jax.Device | jax.sharding.Sharding) -> Array:
    """Copy a host array to a device, or to several as a sharding says.

    A read-only array may be aliased where the device is the host; a writable one is
    copied, since its owner may change it.
    """
    jax_dtype(array.dtype)
    if isinstance(device, jax.sharding.Sharding) and not device.is_fully_addressable:
        # Every process copies what its own devices have.
        def part(index: Any) -> Any:
            return _owned(array.part(index), array.dtype)

        return jax.make_array_from_callback(array.shape, device, part)
    return jax.device_put(_owned(array.data.reshape(array.shape), array.dtype), device)


def _owned(data: Any, dtype: str) -> Any:
    """Return elements that their owner does not change, as JAX's dtype."""
    if data.flags.writeable:
        data = data.copy()  # device_put aliases the memory of the host on the CPU
    return data.view(jnp.bfloat16) if dtype == "bfloat16" else data


def to_host(x: Any) -> HostArray:
    """Copy an array to the host; blocks until it is computed."""
    data = np.asarray(x)
    if data.dtype in (jnp.bfloat16, BITS):
        return HostArray(data.view(np.uint16), "bfloat16", data.shape)
    return wrap(data)


def upcast(x: Any) -> Array:
    """Convert float16 and bfloat16 to float32."""
    half = x.dtype in (jnp.bfloat16, jnp.float16)
    return jnp.asarray(x, jnp.float32 if half else x.dtype)

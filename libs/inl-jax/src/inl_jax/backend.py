"""Base class of JAX backends: XLA kernels on one device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from inl.backend.allocation import allocating
from inl.backend.base import (
    Backend,
    CacheBytes,
    DeviceMemory,
    Precompiler,
    Program,
    StateSpec,
    WeightUpdates,
)
from inl.backend.block_io import BlockIO
from inl.backend.host import host_memory
from inl.backend.provisional import DeviceLoops
from inl.backend.state_bytes import state_bytes
from inl.dtypes import SIZES, HostArray
from inl.errors import OutOfMemory
from inl.spec.cache import State
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.program import ProgramInfo
from inl.spec.step import Bucket
from inl_jax import xla
from inl_jax.buckets import compiled_sizes
from inl_jax.pages import BLOCK_IO, LAYOUT, paged_state
from inl_jax.programs import OOM, Compiler
from inl_jax.tensors import BITS, from_host, jax_dtype, to_host

C = TypeVar("C")


class JaxBackend(Backend):
    """One JAX device. Steps are compiled ahead of time, one program per bucket.

    Abstract: a child sets ``device``, ``traits``, ``place`` and ``compiler``.
    """

    place: jax.Device | jax.sharding.Sharding
    """Device or devices of an array that is not divided."""
    compiler: Compiler

    def tensor(self, data: HostArray) -> Any:
        nbytes = data.size * SIZES.get(data.dtype, 1)
        with self._allocating(nbytes, "tensor"):
            return from_host(data, self.place)

    def numpy(self, x: Any) -> HostArray:
        return to_host(x)

    def state(self, spec: StateSpec, *, limits: Limits) -> State:
        def zeros(shape: tuple[int, ...], dtype: str) -> Any:
            return jnp.zeros(shape, jax_dtype(dtype), device=self.place)

        def cells(shape: tuple[int, ...], dtype: str) -> Any:
            on_cpu = getattr(self.place, "platform", "") == "cpu"
            if dtype == "bfloat16" and on_cpu:
                return jnp.zeros(shape, BITS, device=self.place)
            return zeros(shape, dtype)

        with self._allocating(state_bytes(spec, limits, LAYOUT), "state"):
            return paged_state(spec, limits, zeros, cells)

    def memory(self) -> DeviceMemory:
        assert isinstance(self.place, jax.Device), "a mesh has several"
        return device_memory(self.place)

    def kernels(self) -> Iterable[Kernel]:
        return xla.KERNELS

    def buckets(self, limits: Limits) -> Sequence[Bucket]:
        return compiled_sizes(limits)

    def compile(
        self,
        function: Program,
        bucket: Bucket | None,
        *,
        consumes: Sequence[int],
        info: ProgramInfo | None = None,  # noqa: ARG002
    ) -> Program:
        if bucket is None:
            return self.compiler.any_shape(function, consumes)
        return cast("Program", self.compiler.step(function, bucket, consumes))

    def offers(self, kind: type[C]) -> C | None:
        if kind is Precompiler:
            return cast("C", Precompiler(self.compiler.precompile))
        if kind is DeviceLoops:
            return cast("C", DeviceLoops(jax.lax.while_loop, jnp))
        if kind is CacheBytes:
            return cast("C", LAYOUT)
        if kind is WeightUpdates:
            return cast("C", WeightUpdates(lambda _old, new: self.tensor(new)))
        if kind is BlockIO:
            return cast("C", BLOCK_IO)
        return super().offers(kind)

    def out_of_memory(self, error: Exception) -> Exception:
        """Return the error of the contract for a failed allocation of XLA."""
        text = str(error).partition("\n")[0]
        return OutOfMemory(
            f"{self.device}: {text}; {self.memory().free} bytes are free; lower "
            "token_budget, max_batch or cache_bytes"
        )

    def _allocating(self, nbytes: int, what: str) -> AbstractContextManager[None]:
        where = f"{self.device}: {what}"
        return allocating(nbytes, where, self.memory, lambda error: OOM in str(error))


def device_memory(device: jax.Device) -> DeviceMemory:
    """Return the memory of a device, or of the host if it tells none."""
    found = device.memory_stats()
    if not found or "bytes_limit" not in found:
        return host_memory()
    total = found["bytes_limit"]
    return DeviceMemory(total, total - found["bytes_in_use"])

"""Base class of JAX backends: XLA kernels on one device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from inl.backend.base import (
    Backend,
    DeviceLoops,
    DeviceMemory,
    Precompiler,
    Program,
    StateSpec,
    WeightUpdates,
)
from inl.backend.host import host_memory
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
from inl_jax.pages import paged_state
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

    def tensor(self, data: HostArray, *, axis: int | None = None) -> Any:  # noqa: ARG002
        nbytes = data.size * SIZES.get(data.dtype, 1)
        return self._allocate(lambda: from_host(data, self.place), nbytes, "tensor")

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

        size = state_bytes(spec, limits)
        return self._allocate(
            lambda: paged_state(spec, limits, zeros, cells), size, "state"
        )

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
        if kind is WeightUpdates:
            return cast("C", WeightUpdates(lambda _old, new: self.tensor(new)))
        return super().offers(kind)

    def out_of_memory(self, error: Exception) -> Exception:
        """Return the error of the contract for a failed allocation of XLA."""
        text = str(error).partition("\n")[0]
        return OutOfMemory(
            f"{self.device}: {text}; {self.memory().free} bytes are free; lower "
            "token_budget, max_batch or cache_bytes"
        )

    def _allocate(self, make: Any, nbytes: int, what: str) -> Any:
        try:
            return make()
        except Exception as error:
            if OOM not in str(error) and not isinstance(error, MemoryError):
                raise
            raise OutOfMemory(
                f"{self.device}: {what}: {nbytes} bytes ({nbytes / 2**20:.1f} MiB) do "
                f"not fit, {self.memory().free} bytes are free; lower cache_bytes, "
                "max_batch or context, or take a smaller dtype or model"
            ) from error


def device_memory(device: jax.Device) -> DeviceMemory:
    """Return the memory of a device, or of the host if it tells none."""
    found = device.memory_stats()
    if not found or "bytes_limit" not in found:
        return host_memory()
    total = found["bytes_limit"]
    return DeviceMemory(total, total - found["bytes_in_use"])

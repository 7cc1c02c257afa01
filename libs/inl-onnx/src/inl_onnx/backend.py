"""Base class of ONNX Runtime backends: exported programs on one device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

from inl.backend.base import (
    Backend,
    ContextLengths,
    DeviceMemory,
    Program,
    StateSpec,
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
from inl_onnx.buckets import compiled_sizes, context_lengths
from inl_onnx.kernels import KERNELS
from inl_onnx.pages import paged_state
from inl_onnx.programs import NO_MEMORY
from inl_onnx.runtime import Runtime

C = TypeVar("C")


class OnnxBackend(Backend):
    """One device of ONNX Runtime. Steps are exported, one session per bucket.

    Abstract: a child sets ``device``, ``traits`` and ``runtime``.
    """

    runtime: Runtime

    def tensor(self, data: HostArray, *, axis: int | None = None) -> Any:  # noqa: ARG002
        nbytes = data.size * SIZES.get(data.dtype, 1)
        return self._allocate(lambda: self.runtime.tensor(data), nbytes, "tensor")

    def numpy(self, x: Any) -> HostArray:
        return self.runtime.numpy(x)

    def state(self, spec: StateSpec, *, limits: Limits) -> State:
        def pages(shape: tuple[int, ...], dtype: str) -> Any:
            return self.runtime.zeros(shape, dtype, in_place=True)

        zeros, size = self.runtime.zeros, state_bytes(spec, limits)
        return self._allocate(
            lambda: paged_state(spec, limits, zeros, pages), size, "state"
        )

    def memory(self) -> DeviceMemory:
        return host_memory()

    def kernels(self) -> Iterable[Kernel]:
        return KERNELS

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
        return self.runtime.compile(function, consumes, fixed=bucket is not None)

    def offers(self, kind: type[C]) -> C | None:
        if kind is ContextLengths:
            return cast("C", ContextLengths(context_lengths))
        return super().offers(kind)

    def _allocate(self, make: Any, nbytes: int, what: str) -> Any:
        try:
            return make()
        except Exception as error:
            known = any(text in str(error) for text in NO_MEMORY)
            if not known and not isinstance(error, MemoryError):
                raise
            raise OutOfMemory(
                f"{self.device}: {what}: {nbytes} bytes ({nbytes / 2**20:.1f} MiB) do "
                f"not fit, {self.memory().free} bytes are free; lower cache_bytes, "
                "max_batch or context, or take a smaller dtype or model"
            ) from error

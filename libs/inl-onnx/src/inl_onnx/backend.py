"""Base class of ONNX Runtime backends: exported programs on one device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from inl.backend.allocation import allocating
from inl.backend.base import (
    Backend,
    ContextLengths,
    DeviceMemory,
    Program,
    StateSpec,
)
from inl.backend.block_io import BlockIO
from inl.backend.host import host_memory
from inl.backend.simple import zeroed_state
from inl.backend.state_bytes import state_bytes
from inl.dtypes import SIZES, HostArray
from inl.spec.cache import Paged, State
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.program import ProgramInfo
from inl.spec.step import Bucket
from inl_onnx.buckets import compiled_sizes, context_lengths
from inl_onnx.kernels import KERNELS
from inl_onnx.pages import BLOCK_IO, Pages
from inl_onnx.programs import is_oom
from inl_onnx.runtime import Runtime

C = TypeVar("C")


class OnnxBackend(Backend):
    """One device of ONNX Runtime. Steps are exported, one session per bucket.

    Abstract: a child sets ``device``, ``traits`` and ``runtime``.
    """

    runtime: Runtime

    def tensor(self, data: HostArray) -> Any:
        nbytes = data.size * SIZES.get(data.dtype, 1)
        with self._allocating(nbytes, "tensor"):
            return self.runtime.tensor(data)

    def numpy(self, x: Any) -> HostArray:
        return self.runtime.numpy(x)

    def state(self, spec: StateSpec, *, limits: Limits) -> State:
        zeros, size = self.runtime.zeros, limits.block_size

        def pages(group: Paged, _layer: int, blocks: int) -> Pages:
            shape = (group.kv_heads, blocks, size, group.head_dim)
            return Pages(*(zeros(shape, group.dtype, in_place=True) for _ in "kv"))

        with self._allocating(state_bytes(spec, limits), "state"):
            return zeroed_state(spec, limits, zeros, cache=pages)

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
        if kind is BlockIO:
            return cast("C", BLOCK_IO)
        return super().offers(kind)

    def _allocating(self, nbytes: int, what: str) -> AbstractContextManager[None]:
        where = f"{self.device}: {what}"
        return allocating(nbytes, where, self.memory, is_oom)

"""Base class of all torch backends."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from inl.backend.base import (
    Backend,
    CachedMemory,
    Collectives,
    Program,
    Rank,
    Ranks,
    StateSpec,
    WeightUpdates,
)
from inl.backend.collectives import AXES
from inl.backend.simple import zeroed_state
from inl.backend.state_bytes import state_bytes
from inl.dtypes import SIZES, HostArray
from inl.spec.cache import State
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.step import Bucket
from inl_torch import eager
from inl_torch.blocks import ADDRESSES, BLOCK_IO, JoinedCaches
from inl_torch.memory import allocating, translate_oom
from inl_torch.tensors import from_host, to_host, torch_dtype

if TYPE_CHECKING:
    from inl.spec.program import ProgramInfo

C = TypeVar("C")
PAIR = 2
"""Most ranks for which a gathered sum moves no more bytes than an all-reduce."""


class TorchBackend(Backend):
    """Eager kernels on one torch device.

    Abstract: a child sets ``device``, ``traits`` and ``place``, and provides
    ``memory()``.
    """

    place: torch.device
    """Device of all tensors."""
    collectives: Collectives | None = None
    """Collectives of the group of ranks, where this backend is one rank of several."""

    def tensor(self, data: HostArray) -> Any:
        nbytes = data.size * SIZES.get(data.dtype, 1)
        with allocating(nbytes, str(self.device), self.memory):
            return self.to_device(from_host(data))

    def to_device(self, x: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to ``place``."""
        return x.to(self.place)

    def numpy(self, x: Any) -> HostArray:
        return to_host(x)

    def state(self, spec: StateSpec, *, limits: Limits) -> State:
        size, where = state_bytes(spec, limits), f"{self.device}: state"
        with allocating(size, where, self.memory, f"for {_capacity(limits)}; "):
            joined = JoinedCaches(self.zeros, limits.block_size)
            return zeroed_state(
                spec, limits, self.zeros, self.tensor, parts=joined.parts
            )

    def zeros(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Allocate a zeroed tensor of the dtype named ``dtype`` on the device."""
        return torch.zeros(shape, dtype=torch_dtype(dtype), device=self.place)

    def kernels(self) -> Iterable[Kernel]:
        return eager.kernels()

    def buckets(self, limits: Limits) -> Sequence[Bucket]:  # noqa: ARG002
        return ()

    def compile(
        self,
        function: Program,
        bucket: Bucket | None,
        *,
        consumes: Sequence[int],  # noqa: ARG002
        info: ProgramInfo | None = None,  # noqa: ARG002
    ) -> Program:
        return self.guarded(inference_mode(function), bucket)

    def guarded(self, program: Program, bucket: Bucket | None) -> Program:
        """Wrap a program so that it raises :class:`~inl.errors.OutOfMemory`."""
        step = f"step of {bucket.tokens} tokens" if bucket else "admission"
        where = f"{self.device}: {step}"
        return translate_oom(program, where, self.memory, self.empty_cache)

    def empty_cache(self) -> None:
        """Free the device memory that torch has cached but not allocated."""
        torch.cuda.empty_cache()

    def _release(self) -> None:
        gc.collect()  # captured graphs and programs may refer to each other
        self.empty_cache()

    def offers(self, kind: type[C]) -> C | None:
        has_cache = torch.device(self.place).type != "cpu"
        capabilities = (
            self.collectives,
            Ranks(self._join, invariant_ranks=PAIR, axes=AXES),
            WeightUpdates(_overwritten),
            BLOCK_IO,
            ADDRESSES,
            CachedMemory(self._release) if has_cache else None,
        )
        return next((each for each in capabilities if isinstance(each, kind)), None)

    def _join(self, rank: Rank) -> TorchBackend:
        from inl_torch.collectives import ProcessCollectives

        twin = copy(self)
        twin.collectives = ProcessCollectives(rank, self.place, self.device)
        return twin


def _overwritten(tensor: torch.Tensor, data: HostArray) -> torch.Tensor:
    """Copy new data into a tensor, which captured programs refer to."""
    return tensor.copy_(from_host(data))


def inference_mode(function: Program) -> Program:
    """Wrap a function so that it runs under :func:`torch.inference_mode`."""

    def run(*args: Any) -> Any:
        with torch.inference_mode():
            return function(*args)

    return run


def _capacity(limits: Limits) -> str:
    counts = ", ".join(f"{count}" for count in limits.blocks)
    return f"{limits.slots} slots and {counts} blocks of {limits.block_size} tokens"

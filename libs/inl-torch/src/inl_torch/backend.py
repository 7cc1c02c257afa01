"""What every torch backend does alike; a child names its device and its memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, TypeVar

import torch

from inl.backend.base import (
    Backend,
    Collectives,
    Program,
    Rank,
    Ranks,
    StateSpec,
)
from inl.backend.simple import zeroed_state
from inl.dtypes import SIZES, HostArray
from inl.spec.cache import Paged, Slotted, State
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.step import Bucket
from inl_torch import eager
from inl_torch.gpu.graphs import Arriving
from inl_torch.memory import allocating, surviving
from inl_torch.tensors import from_host, to_host, torch_dtype

C = TypeVar("C")

PINNED = 1 << 20
"""Bytes up to which a copy to a CUDA device is not waited for: a step's message."""


class TorchBackend(Backend):
    """Eager kernels on a torch device; a child sets device, traits and place."""

    place: torch.device
    """Where torch keeps the tensors."""
    collectives: Collectives | None = None
    """The other ranks, where this is one of several."""

    def tensor(self, data: HostArray, *, axis: int | None = None) -> Any:  # noqa: ARG002
        nbytes = data.size * SIZES.get(data.dtype, 1)
        with allocating(nbytes, str(self.device), self.memory):
            held = from_host(data)
            if self.place.type == "cuda" and held.nbytes <= PINNED:
                return held.pin_memory().to(self.place, non_blocking=True)
            return held.to(self.place)

    def numpy(self, x: Any) -> HostArray:
        return to_host(x.wait() if isinstance(x, Arriving) else x)

    def state(self, spec: StateSpec, *, limits: Limits) -> State:
        size, where = state_bytes(spec, limits), f"{self.device}: state"
        with allocating(size, where, self.memory, f"for {_blocks(limits)}; "):
            return zeroed_state(spec, limits, self._zeros)

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
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
    ) -> Program:
        return self.guarded(inferring(function), bucket)

    def guarded(self, program: Program, bucket: Bucket | None) -> Program:
        """Raise :class:`~inl.errors.OutOfMemory` where a program's memory is short."""
        step = f"step of {bucket.tokens} tokens" if bucket else "admission"
        return surviving(program, f"{self.device}: {step}", self.memory)

    def offers(self, kind: type[C]) -> C | None:
        offered = (self.collectives, Ranks(self._join))
        return next((found for found in offered if isinstance(found, kind)), None)

    def _join(self, rank: Rank) -> TorchBackend:
        from inl_torch.collectives import ProcessCollectives

        twin = copy(self)
        twin.collectives = ProcessCollectives(rank, self.place)
        return twin


def inferring(function: Program) -> Program:
    """Run a function without torch's bookkeeping for gradients."""

    def run(*args: Any) -> Any:
        with torch.inference_mode():
            return function(*args)

    return run


def _blocks(limits: Limits) -> str:
    counts = ", ".join(f"{count}" for count in limits.blocks)
    return f"{limits.slots} slots and {counts} blocks of {limits.block_size} tokens"


def state_bytes(spec: StateSpec, limits: Limits) -> int:
    """Bytes of the caches and slots; tables are small beside them."""
    total = 0
    paged = [item for item in spec if isinstance(item, Paged)]
    for group, blocks in zip(paged, limits.blocks, strict=True):
        cells = blocks * limits.block_size * group.kv_heads * group.head_dim
        total += 2 * len(group.layers) * cells * SIZES[group.dtype]
    for item in spec:
        if isinstance(item, Slotted):
            total += limits.slots * math.prod(item.shape) * SIZES[item.dtype]
    return total

"""Copies of blocks between a GPU and page-locked memory, beside its steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from inl.backend.block_io import BlockIO
from inl.dtypes import HostArray
from inl_torch.gpu.pinned_memory import PinnedMemory, locked
from inl_torch.tensors import BITS, NAMES, aliased
from inl_torch.triton.step import copy_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@cache
def copy_stream(place: torch.device) -> torch.cuda.Stream:
    """Return the stream of copies to the host, which steps do not wait for."""
    return torch.cuda.Stream(place)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, eq=False)
class PinnedBlock(HostArray):
    """Cells of one block, and a tensor [layers, 2, ...] in their memory."""

    tensor: Any = None

    @classmethod
    def of(cls, cells: HostArray) -> PinnedBlock:
        """Return cells [layers, 2, 1, ...] with their tensor."""
        if isinstance(cells, PinnedBlock):
            return cells
        tensor = aliased(cells).squeeze(2)
        return cls(cells.data, cells.dtype, cells.shape, tensor=tensor)


class BlockTransfers:
    """Copies between a GPU and arrays of ``memory``, of one block each.

    Arrays are referred to, and so not used again, until their copies are done.
    """

    def __init__(self, place: torch.device, memory: PinnedMemory) -> None:
        self._place, self._memory = place, memory
        self._to_host, self._to_device = InFlight(), InFlight()

    def to_host(
        self, cells: torch.Tensor, count: int
    ) -> Callable[[], Sequence[HostArray]]:
        """See :class:`~inl.backend.block_io.BlockIO`."""
        rows = cells.movedim(2, 0)[:count]
        name, shape = NAMES[cells.dtype], (*cells.shape[:2], 1, *cells.shape[3:])
        kind = BITS[name][1] if name in BITS else name
        empty = self._memory.empty
        arrays = [
            PinnedBlock.of(HostArray(empty(shape, kind), name, shape))
            for _ in range(count)
        ]
        stream = copy_stream(self._place)
        stream.wait_stream(torch.cuda.current_stream(self._place))
        cells.record_stream(stream)
        with torch.cuda.stream(stream):
            for array, row in zip(arrays, rows.unbind(), strict=True):
                array.tensor.copy_(row, non_blocking=True)
            event = stream.record_event()
        self._to_host.add(event, arrays)

        def wait() -> Sequence[HostArray]:
            event.synchronize()
            return arrays

        return wait

    def from_host(self, blocks: Sequence[HostArray], count: int) -> torch.Tensor:
        """See :class:`~inl.backend.block_io.BlockIO`."""
        tensors = [PinnedBlock.of(block).tensor for block in blocks]
        cells = torch.empty(
            (count, *tensors[0].shape), dtype=tensors[0].dtype, device=self._place
        )
        for row, tensor in zip(cells.unbind(), tensors, strict=False):
            row.copy_(tensor, non_blocking=True)
        if len(tensors) < count:
            cells[len(tensors) :].view(torch.uint8).zero_()
        stream = torch.cuda.current_stream(self._place)
        self._to_device.add(stream.record_event(), blocks)
        return cells.movedim(0, 2)


class InFlight:
    """What copies in flight refer to, in the order of one stream."""

    def __init__(self) -> None:
        self._items: deque[tuple[Any, object]] = deque()

    def add(self, event: Any, used: object) -> None:
        """Refer to what is used until the event; forget what is not used any more."""
        while self._items and self._items[0][0].query():
            self._items.popleft()
        self._items.append((event, used))

    def __del__(self) -> None:
        # Memory that is unlocked must not be in use.
        for event, _ in self._items:
            event.synchronize()


def block_io(place: torch.device) -> BlockIO:
    """Return the capability of a GPU with Triton."""
    memory = PinnedMemory(partial(locked, place))
    copies = BlockTransfers(place, memory)

    def tensor(host: HostArray) -> torch.Tensor:
        return aliased(host).to(place)

    return BlockIO(
        copy_blocks.read, copy_blocks.write, tensor, memory.empty,
        copies.to_host, copies.from_host,
    )  # fmt: skip

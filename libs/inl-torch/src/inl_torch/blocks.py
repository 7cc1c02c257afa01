"""Caches whose layers are parts of one tensor, and copies of their blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from inl.backend.block_io import Addresses, BlockIO, Blocks, MemoryRange
from inl.spec.cache import Paged, State


class JoinedCaches:
    """Allocates the caches of a group as one tensor [layers, 2, blocks, ...].

    So that one gather reads a block of all layers. zeros: allocates a tensor of a shape
    and a dtype name.
    """

    def __init__(
        self, zeros: Callable[[tuple[int, ...], str], torch.Tensor], block_size: int
    ) -> None:
        self._zeros, self._block_size = zeros, block_size
        self._made: dict[tuple[int, ...], torch.Tensor] = {}

    def parts(
        self, group: Paged, layer: int, blocks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of one layer."""
        if group.layers not in self._made:
            shape = blocks, self._block_size, group.kv_heads, group.head_dim
            whole = self._zeros((len(group.layers), 2, *shape), group.dtype)
            self._made[group.layers] = whole
        k, v = self._made[group.layers][group.layers.index(layer)]
        return k, v


def whole_cache(state: State, group: Paged) -> torch.Tensor:
    """Return the tensor [layers, 2, blocks, ...] that a group's caches are parts of."""
    first: torch.Tensor = state.caches[group.layers[0]].k
    size = first.numel()
    shape = (len(group.layers), 2, *first.shape)
    strides = (2 * size, size, *first.stride())
    if first.dtype == torch.float8_e4m3fn:
        first = first.view(torch.uint8)  # index functions have no kernels for float8
    return first.as_strided(shape, strides, first.storage_offset())


def read(state: State, group: Paged, blocks: torch.Tensor) -> Blocks:
    return Blocks(whole_cache(state, group).index_select(2, blocks))


def write(state: State, group: Paged, blocks: torch.Tensor, contents: Blocks) -> State:
    whole = whole_cache(state, group)
    cells: torch.Tensor = contents.cells
    whole.index_copy_(2, blocks.long(), cells.view(whole.dtype))
    return state


BLOCK_IO = BlockIO(read, write)


def memory_range(x: torch.Tensor) -> MemoryRange:
    """Return the memory of a contiguous tensor, once it is computed."""
    device = str(x.device)
    if x.device.type != "cpu":
        torch.accelerator.synchronize(x.device)
    return MemoryRange(
        x.data_ptr(), x.nbytes, "host" if x.device.type == "cpu" else device
    )


ADDRESSES = Addresses(memory_range)

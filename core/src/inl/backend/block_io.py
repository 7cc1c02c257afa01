"""Capabilities that copy the contents of a cache to and from tensors of one layout.

The layout is that of :mod:`inl.spec.cache_layout`, so that caches of other backends,
ranks and processes can have the same contents. A backend whose caches have the layout
:class:`~inl.spec.cache.Cache` needs neither capability: :func:`composed_blocks` and
:func:`composed_slots` compute both by ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.dtypes import E4M3
from inl.spec.cache import Cache, Paged, State
from inl.spec.cache_layout import Empty
from inl.spec.step import Array, Step

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.dtypes import HostArray
    from inl.ops.protocol import Ops


class Blocks(NamedTuple):
    """Contents of n blocks of a cache group, tensors of a backend."""

    cells: Any
    """[layers, 2, n, block_size, kv_heads, head_dim], or a tuple of the tensors [n,
    block_size, kv_heads, head_dim] of each layer's keys and values in turn. Numbers of
    the cache's dtype, or the bits of those that the backend lacks."""
    scales: Any = None
    """Of int8, float32: as ``cells``, without the last axis."""


def plain_memory(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Allocate an array as NumPy does."""
    import numpy as np

    return np.empty(shape, dtype)


ToHost = Callable[[Array, int], Callable[[], "Sequence[HostArray]"]]
FromHost = Callable[["Sequence[HostArray]", int], Array]


class BlockIO(NamedTuple):
    """Capability: copies blocks of the paged cache to and from one layout.

    The functions are compiled as programs are, for 1 and 16 blocks as "admit" is for
    admissions; block 0 pads both. Blocks and positions that are not named keep their
    contents. ``layers`` of a group are indices into ``State.caches``. Without the
    capability, caches in the default layout are copied by ops, and others are not.
    """

    read: Callable[[State, Paged, Array], Blocks]
    """Takes the state, a cache group and the ids of blocks, int32 [n]; consumes
    nothing."""
    write: Callable[[State, Paged, Array, Blocks], State]
    """Takes also the contents, of which ``cells`` are one tensor; consumes the state.
    """
    tensor: Callable[[HostArray], Array] | None = None
    """Copies cells in the cache's dtype to the device; by default
    :meth:`~inl.backend.base.Backend.tensor`. Need not wait for the copy from an array
    of ``empty``."""
    empty: Empty = plain_memory
    """Allocates arrays by shape and NumPy dtype from which copies to the device are
    fast, such as in pinned memory. It is not used again before the copies are done."""
    to_host: ToHost | None = None
    """Begins to copy cells that ``read`` has returned, of a number of blocks, beside
    later steps. The result waits for it and returns the cells of each block, [layers,
    2, 1, block_size, kv_heads, head_dim], in memory of their own. By default
    :meth:`~inl.backend.base.Backend.numpy`, and a copy of each block."""
    from_host: FromHost | None = None
    """Copies such cells of several blocks to the device as one tensor of a number of
    blocks, with zeros for those that are not given. By default they are joined in an
    array of ``empty`` and copied by ``tensor``."""


class SlotIO(NamedTuple):
    """Capability: copies the slotted state of one sequence.

    Without it the state is copied by the ops ``take_rows`` and ``write_slots``. row:
    int32 [6], the slot, then 0, 1, 1, 1, 1.
    """

    read: Callable[[State, Array], Mapping[str, Array]]
    """Takes the state and ``row``; returns tensors [1, ...] by name."""
    write: Callable[[State, Array, Mapping[str, Array]], State]
    """Takes the state, ``row`` and such tensors; consumes the state."""


class MemoryRange(NamedTuple):
    """Memory of a contiguous tensor."""

    address: int
    """Of its first byte, on the device."""
    nbytes: int
    """Size in bytes."""
    device: str
    """"host", or the device as torch names it, such as "cuda:0"."""


class Addresses(NamedTuple):
    """Capability: lends the memory of tensors to libraries that copy it themselves.

    For transports that register memory, such as NIXL. The tensor must stay alive, and
    nothing may write to it, until the copy is done.
    """

    memory: Callable[[Array], MemoryRange]
    """Takes a contiguous tensor of the backend, and waits until it is computed."""


def host_memory_range(array: Any) -> MemoryRange:
    """Return the memory of a contiguous NumPy array."""
    return MemoryRange(array.ctypes.data, array.nbytes, "host")


def composed_blocks(ops: Ops, tensor: Callable[[HostArray], Array]) -> BlockIO:
    """Return a capability over ops, for caches in the default layout.

    A block is gathered as a row, and written as a key of a cache with one token per
    block. tensor: that of the backend.
    """

    def read(state: State, group: Paged, blocks: Array) -> Blocks:
        caches = (state.caches[layer] for layer in group.layers)
        parts = [part for cache in caches for part in (cache.k, cache.v)]
        return Blocks(tuple(ops.take_rows(part, blocks) for part in parts))

    def write(state: State, group: Paged, blocks: Array, contents: Blocks) -> State:
        caches = list(state.caches)
        for at, layer in enumerate(group.layers):
            cache: Cache = caches[layer]
            count, size, heads, dim = cache.k.shape
            k, v = (
                contents.cells[at, side].reshape(-1, size * heads, dim)
                for side in (0, 1)
            )
            rows = (count, 1, size * heads, dim)
            plain = Cache(cache.k.reshape(*rows), cache.v.reshape(*rows))
            written = ops.write_kv(k, v, plain, blocks)
            caches[layer] = cache._replace(
                k=written.k.reshape(count, size, heads, dim),
                v=written.v.reshape(count, size, heads, dim),
            )
        return state._replace(caches=tuple(caches))

    def numbers(cells: HostArray) -> Array:
        from inl.dtypes import decoded_e4m3, wrap

        # The default layout has numbers of float8 in float32.
        return tensor(wrap(decoded_e4m3(cells.data)) if cells.dtype == E4M3 else cells)

    return BlockIO(read, write, numbers)


def composed_slots(ops: Ops) -> SlotIO:
    """Return a capability over ops."""

    def read(state: State, row: Array) -> Mapping[str, Array]:
        return {
            name: ops.take_rows(table, row[:1]) for name, table in state.slotted.items()
        }

    def write(state: State, row: Array, contents: Mapping[str, Array]) -> State:
        one = row[:1]
        step = Step(
            tokens=one, positions=one, rows=row[1:2], starts=row[1:3],
            lengths=row[2:3], slots=one, blocks=one.reshape(1, 1, 1),
            writes=one.reshape(1, 1), samples=row[1:2], adapters=row[1:2],
            used_counts=row[3:6], uniforms=row[1:2],
        )  # fmt: skip
        tables = {
            name: ops.write_slots(contents[name], table, step)
            for name, table in state.slotted.items()
        }
        return state._replace(slotted=tables)

    return SlotIO(read, write)

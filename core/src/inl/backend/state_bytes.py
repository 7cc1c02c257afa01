"""Memory that the state of a runner takes, computed from its specification."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from inl.dtypes import SIZES
from inl.ops.step import empty_tables
from inl.spec.cache import Paged, Slotted

if TYPE_CHECKING:
    from inl.backend.base import CacheBytes, StateSpec
    from inl.spec.limits import Limits


def state_bytes(
    spec: StateSpec, limits: Limits, layout: CacheBytes | None = None
) -> int:
    """Bytes of the caches, slots and tables of a runner with ``limits``.

    layout: what the backend offers.
    """
    paged = [item for item in spec if isinstance(item, Paged)]
    groups = zip(paged, limits.blocks, strict=True)
    caches = sum(
        blocks * block_bytes(group, limits.block_size, layout)
        for group, blocks in groups
    )
    slotted = sum(
        array_bytes((limits.slots, *item.shape), item.dtype)
        for item in spec
        if isinstance(item, Slotted)
    )
    return caches + slotted + table_bytes(limits)


def block_bytes(group: Paged, block_size: int, layout: CacheBytes | None = None) -> int:
    """Bytes of one block of a cache group: keys, values and scales of all its layers.

    block_size: tokens per block. layout: what the backend offers.
    """
    if layout is None:
        return len(group.layers) * group.token_bytes * block_size
    return len(group.layers) * layout.block_bytes(group, block_size)


def table_bytes(limits: Limits) -> int:
    """Bytes of the tables of :class:`~inl.spec.step.Tables`."""
    sizes: Any = empty_tables(
        groups=limits.groups,
        slots=limits.slots,
        max_blocks_per_seq=limits.max_blocks_per_seq,
        vocab=limits.penalty_vocab,
        zeros=array_bytes,
    )
    return sum(sizes)


def array_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of an array of ``shape`` and the dtype named ``dtype``."""
    return math.prod(shape) * SIZES[dtype]

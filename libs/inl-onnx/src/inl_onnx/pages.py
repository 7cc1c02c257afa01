"""Layout of the paged cache: blocks by key head."""

from __future__ import annotations

from typing import Any, NamedTuple

from inl.backend.block_io import BlockIO, Blocks
from inl.spec.cache import Paged, State
from inl_onnx import functions as fn


class Pages(NamedTuple):
    """One layer's cache.

    With the heads first, gathering the blocks of a sequence gives the operands of its
    products without a transposition.
    """

    k: Any
    """[kv_heads, blocks, block_size, head_dim]."""
    v: Any
    """[kv_heads, blocks, block_size, head_dim]."""


def read_blocks(state: State, group: Paged, blocks: Any) -> Blocks:
    """Return the contents of blocks."""
    caches = (state.caches[layer] for layer in group.layers)
    found = [fn.take(part, blocks, 1) for cache in caches for part in cache]
    return Blocks(tuple(fn.transpose(part, 1, 2, 0, 3) for part in found))


def write_blocks(state: State, group: Paged, blocks: Any, contents: Blocks) -> State:
    """Overwrite the contents of blocks."""
    caches = list(state.caches)
    at = fn.arange(blocks, group.kv_heads)[:, None], blocks
    for number, layer in enumerate(group.layers):
        pages = [
            fn.put(part, at, fn.transpose(contents.cells[number, side], 2, 0, 1, 3))
            for side, part in enumerate(caches[layer])
        ]
        caches[layer] = Pages(*pages)
    return state._replace(caches=tuple(caches))


BLOCK_IO = BlockIO(read_blocks, write_blocks)

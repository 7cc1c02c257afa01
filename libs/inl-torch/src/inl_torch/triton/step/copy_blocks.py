"""Copies of blocks between a cache and one tensor, one kernel for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.backend.block_io import Blocks
from inl_torch import blocks as eager
from inl_torch.blocks import whole_cache

if TYPE_CHECKING:
    from inl.spec.cache import Paged, State

WORD = torch.int32
TILE = 2048
"""Words that one program copies."""


@triton.jit
def _copy(
    cache: tensor, contents: tensor, blocks: tensor, words: tensor, side_stride: tensor,
    sides: tensor, WRITES: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """words: of a block of one side, keys or values of a layer. side_stride: between
    two sides of the cache, in words. contents: [blocks, sides, words].
    """
    at, side = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    block = tl.load(blocks + at).to(tl.int64)
    word = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = word < words
    stored = cache + side * side_stride + block * words + word
    copied = contents + (at * sides + side) * words + word
    if WRITES:
        tl.store(stored, tl.load(copied, mask=inside), mask=inside)
    else:
        tl.store(copied, tl.load(stored, mask=inside), mask=inside)


def _run(
    whole: torch.Tensor, cells: torch.Tensor, blocks: torch.Tensor, *, writes: bool
) -> None:
    """Copy between a cache [layers, 2, blocks, ...] and cells [n, layers, 2, ...]."""
    layers, sides, total = whole.shape[:3]
    words = whole[0, 0, 0].numel() * whole.element_size() // WORD.itemsize
    grid = len(cells), layers * sides, triton.cdiv(words, TILE)
    _copy[grid](
        whole.view(-1).view(WORD), cells.view(-1).view(WORD), blocks, words,
        total * words, layers * sides, WRITES=writes, TILE=TILE, num_warps=8,
    )  # fmt: skip


def is_served(whole: torch.Tensor) -> bool:
    """Whether a block of each layer is a whole number of words."""
    size = whole[0, 0, 0].numel() * whole.element_size()
    return size % WORD.itemsize == 0 and whole.data_ptr() % WORD.itemsize == 0


def read(state: State, group: Paged, blocks: torch.Tensor) -> Blocks:
    """Each block of the cells is contiguous."""
    whole = whole_cache(state, group)
    if not is_served(whole):
        return eager.read(state, group, blocks)
    shape = (len(blocks), *whole.shape[:2], *whole.shape[3:])
    cells = torch.empty(shape, dtype=whole.dtype, device=whole.device)
    _run(whole, cells, blocks, writes=False)
    return Blocks(cells.movedim(0, 2))


def write(state: State, group: Paged, blocks: torch.Tensor, contents: Blocks) -> State:
    whole = whole_cache(state, group)
    if not is_served(whole):
        return eager.write(state, group, blocks, contents)
    cells: torch.Tensor = contents.cells.movedim(2, 0)
    _run(whole, cells.contiguous().view(whole.dtype), blocks, writes=True)
    return state

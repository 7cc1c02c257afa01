"""Copies of blocks of all layers by one kernel, against indexing."""

from __future__ import annotations

import pytest
import torch
from triton_place import PLACE

from inl.backend.block_io import Blocks
from inl.spec.cache import Cache, Paged, State
from inl_torch.blocks import whole_cache
from inl_torch.triton.step import copy_blocks

KINDS = {
    "bfloat16": (torch.bfloat16, 12),
    "float8": (torch.float8_e4m3fn, 8),
    "float32, tiles in part": (torch.float32, 66),
    "odd sizes": (torch.float8_e4m3fn, 3),
}


def made(kind, layers=(0, 1, 2), blocks=9, size=5, heads=3, seed=1):
    """A state whose cache is one tensor, and that tensor as bits."""
    dtype, dim = KINDS[kind]
    shape = len(layers), 2, blocks, size, heads, dim
    draws = torch.Generator().manual_seed(seed)
    sizes = *shape, dtype.itemsize
    bits = torch.randint(0, 255, sizes, dtype=torch.uint8, generator=draws)
    whole = bits.to(PLACE).view(dtype).reshape(shape)
    caches = tuple(Cache(*whole[layer]) for layer in layers)
    return State(caches, {}, None), Paged(tuple(layers), heads, dim, "float32"), whole


def bits_of(x):
    return x.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", [[4], [8, 1, 3, 7]])
def test_blocks_of_all_layers_are_read(kind, ids):
    state, group, whole = made(kind)
    blocks = torch.tensor(ids, dtype=torch.int32, device=PLACE)
    found = copy_blocks.read(state, group, blocks).cells
    assert torch.equal(bits_of(found), bits_of(whole)[:, :, ids])


@pytest.mark.parametrize("kind", KINDS)
def test_only_named_blocks_are_written(kind):
    state, group, whole = made(kind)
    _, _, other = made(kind, seed=2)
    ids = [6, 2, 5]
    wanted = bits_of(whole).clone()
    wanted[:, :, ids] = bits_of(other)[:, :, :3]
    blocks = torch.tensor(ids, dtype=torch.int32, device=PLACE)
    copy_blocks.write(state, group, blocks, Blocks(other[:, :, :3]))
    assert torch.equal(bits_of(whole), wanted)


def test_few_kinds_are_copied_without_the_kernel():
    kernel = {
        kind: copy_blocks.is_served(whole_cache(*made(kind)[:2])) for kind in KINDS
    }
    assert kernel == {**dict.fromkeys(KINDS, True), "odd sizes": False}

"""Paged caches whose blocks are divided over the devices of a mesh's data axis.

Block ``i`` is on device ``i % devices``, so that the blocks of every sequence are
divided evenly. Each device attends to its blocks; the partial softmaxes are combined.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from inl.ops.sink_attention import Sinks
from inl.placement.mesh import DATA
from inl.spec.kernel import Kernel
from inl.spec.step import Step
from inl_jax.pages import Pages
from inl_jax.pages import write_kv as write_pages
from inl_jax.tensors import Array
from inl_jax.xla.attention import (
    LABEL,
    SINK_LABEL,
    UNSEEN,
    Blocks,
    Plan,
    Sums,
    attend_blocks,
    finished,
    plan,
    plan_of,
)
from inl_jax.xla.kernel import inlined, kernel


def write_kv(k: Array, v: Array, cache: Pages, writes: Array) -> Pages:
    """The op ``write_kv``; each device writes to its own blocks."""
    block, offset = writes // cache.block_size, writes % cache.block_size
    devices = jax.lax.axis_size(DATA)
    mine = block % devices == jax.lax.axis_index(DATA)
    # An update outside of the array is dropped.
    local = jnp.where(mine, block // devices, cache.kv.shape[0])
    return write_pages(k, v, cache, local * cache.block_size + offset)


def local_blocks(step: Step, group: int, block_size: int) -> Blocks:
    """Return the blocks of each row that this device has, in order, first."""
    table, devices = step.blocks[group], jax.lax.axis_size(DATA)
    index = jnp.arange(table.shape[1])
    mine = table % devices == jax.lax.axis_index(DATA)
    mine &= index * block_size < step.lengths[:, None]
    order = jnp.argsort(~mine, axis=1, stable=True)
    count = mine.sum(1)
    ids = jnp.where(mine, table // devices, 0)
    return Blocks(
        ids=jnp.take_along_axis(ids, order, axis=1),
        places=jnp.where(index < count[:, None], order, UNSEEN),
        most=count.max(),
    )


class _Call(NamedTuple):
    scale: float
    window: int | None
    cap: float | None
    group: int


def _attend(
    q: Array, cache: Pages, step: Step, tiles: Plan, call: _Call, sinks: Any = None
) -> Array:
    blocks = local_blocks(step, call.group, cache.block_size)
    part = attend_blocks(q, cache, blocks, tiles, call.scale, call.window, call.cap)
    highest = jax.lax.pmax(part.highest, DATA)
    rescale = jnp.exp(part.highest - highest)
    total, out = jax.lax.psum(
        (part.total * rescale, part.out * rescale[..., None]), DATA
    )
    return finished(Sums(highest, total, out), tiles, q, sinks)


def attention(
    q: Array,
    cache: Pages,
    step: Step,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
) -> Array:
    tiles = plan_of(step, LABEL, cache.block_size)
    return _attend(q, cache, step, tiles, _Call(scale, window, cap, group))


def sink_attention(
    q: Array,
    cache: Pages,
    step: Step,
    w: Sinks,
    *,
    scale: float,
    window: int | None,
    group: int,
) -> Array:
    tiles = plan_of(step, SINK_LABEL, cache.block_size)
    call = _Call(scale, window, None, group)
    return _attend(q, cache, step, tiles, call, w.logits)


KERNELS: tuple[Kernel, ...] = (
    kernel(write_kv),
    kernel(attention, plan=inlined(plan)),
    kernel(sink_attention, plan=inlined(plan)),
)

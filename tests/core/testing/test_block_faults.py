"""Faults of BlockIO, SlotIO and Addresses: ``inl check`` finds and names each."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from inl.backend.base import Traits
from inl.backend.block_io import (
    Addresses,
    BlockIO,
    Blocks,
    MemoryRange,
    SlotIO,
    host_memory_range,
)
from inl.backend.reference import body_kernel
from inl.backend.simple import plain_state
from inl.device import Device
from inl.dtypes import widen, wrap
from inl.ops import catalog
from inl.plugin import simple_backend
from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.testing.check import perform
from inl.testing.conformance import checks_of
from inl.testing.findings import findings
from inl.testing.target import Target


class Own(NamedTuple):
    """A cache in another layout than the default, with scales in int8."""

    k: Any
    v: Any
    scales: Any


def tensor(host):
    values = widen(host)
    kind = values.dtype.kind
    return np.array(values, np.float32 if kind == "f" else values.dtype)


def own_state(spec, limits):
    made = plain_state(spec, limits, tensor)
    caches = []
    for cache in made.caches:
        scales = np.zeros((2, *cache.k.shape[:3]), np.float32)
        caches.append(Own(np.array(cache.k), np.array(cache.v), scales))
    return made._replace(caches=tuple(caches))


def write_kv(k, v, cache, writes):
    at = np.divmod(writes, cache.k.shape[1])
    for side, (x, cells) in enumerate(((k, cache.k), (v, cache.v))):
        if cells.dtype == np.int8:
            scale = np.maximum(np.abs(x).max(-1), 1e-30) / 127
            cells[at] = np.rint(x / scale[..., None])
            cache.scales[side][at] = scale
        else:
            cells[at] = x
    return cache


def attention(run):
    def call(q, cache, step, **attrs):
        k, v = cache.k, cache.v
        if k.dtype == np.int8:
            k, v = (x * s[..., None] for x, s in zip((k, v), cache.scales, strict=True))
        return run(q, Cache(k, v), step, **attrs)

    return call


def kernels():
    for op in catalog().values():
        if not op.composite:
            run = body_kernel(op, "float32")
            if op.name == "attention":
                run = attention(run)
            yield Kernel(op.name, "own", write_kv if op.name == "write_kv" else run)


def read(state, group, blocks):
    caches = [state.caches[layer] for layer in group.layers]
    cells = np.stack([[cache.k[blocks], cache.v[blocks]] for cache in caches])
    if group.dtype != "int8":
        return Blocks(cells)
    return Blocks(cells, np.stack([cache.scales[:, blocks] for cache in caches]))


def write(state, group, blocks, contents):
    for at, layer in enumerate(group.layers):
        cache = state.caches[layer]
        cache.k[blocks], cache.v[blocks] = contents.cells[at]
        if contents.scales is not None:
            cache.scales[:, blocks] = contents.scales[at]
    return state


def target_of(*capabilities, state=own_state):
    make = simple_backend(
        tensor=tensor, numpy=wrap, kernels=kernels, state=state,
        traits=Traits(dtypes=("float32",), block_size=8, depth=2, kv_dtypes=("int8",)),
        capabilities=capabilities,
    )  # fmt: skip
    target = Target(Device("planted:0"))
    target.__dict__["backend"] = make(target.device)
    return target


def failures(*capabilities, beginning=""):
    checks = checks_of(target_of(*capabilities), ["blocks"])
    checks = [check for check in checks if check.name.startswith(beginning)]
    assert checks
    return [each.first for each in findings(perform(check, {}) for check in checks)]


def swapped_read(state, group, blocks):
    found = read(state, group, blocks)
    return found._replace(cells=found.cells[:, ::-1])


def next_block(state, group, blocks):
    return read(state, group, (blocks + 1) % len(state.caches[0].k))


def first_layer(state, group, blocks):
    found = read(state, group, blocks)
    found.cells[1:] = 0
    return found


def forgotten_scales(state, group, blocks):
    found = read(state, group, blocks)
    if found.scales is None:
        return found
    return found._replace(scales=np.ones_like(found.scales))


def in_order(state, group, blocks):
    return read(state, group, np.sort(blocks))


READS = {
    "swapped": (swapped_read, "keys and values are swapped"),
    "next block": (next_block, "the contents are those of the blocks beside"),
    "first layer": (first_layer, "layers [1] of the group are wrong"),
    "scales": (forgotten_scales, "the scales are missing or wrong"),
    "in order": (in_order, "expected"),
}


@pytest.mark.parametrize("fault", READS)
def test_a_wrong_read_is_named(fault):
    wrong, part = READS[fault]
    found = failures(BlockIO(wrong, write), beginning="blocks/read")
    assert found
    assert "BlockIO.read of blocks" in found[0].message
    assert part in found[0].message


def swapped_write(state, group, blocks, contents):
    return write(state, group, blocks, Blocks(contents.cells[:, ::-1], contents.scales))


def all_at_next(state, group, blocks, contents):
    return write(state, group, blocks + 1, contents)


def also_others(state, group, blocks, contents):
    write(state, group, blocks, contents)
    for layer in group.layers:
        state.caches[layer].k[int(blocks[0]) + 1] = 1
    return state


def only_first(state, group, blocks, contents):
    return write(state, group._replace(layers=group.layers[:1]), blocks, contents)


def without_scales(state, group, blocks, contents):
    return write(state, group, blocks, Blocks(contents.cells))


WRITES = {
    "swapped": (swapped_write, "keys and values are swapped"),
    "next block": (all_at_next, "which is not named, has changed"),
    "others": (also_others, "which is not named, has changed"),
    "first layer": (only_first, "layers [1] of the group are wrong"),
    "scales": (without_scales, "the scales are missing or wrong"),
}


@pytest.mark.parametrize("fault", WRITES)
def test_a_wrong_write_is_named(fault):
    wrong, part = WRITES[fault]
    found = failures(BlockIO(read, wrong), beginning="blocks/write")
    assert found
    assert "BlockIO.write to blocks" in found[0].message
    assert part in found[0].message


def test_a_write_to_the_padding_of_every_program_is_accepted():
    def padding(state, group, blocks, contents):
        state.caches[0].k[0] = 7
        return write(state, group, blocks, contents)

    assert failures(BlockIO(read, padding), beginning="blocks/") == []


def test_right_capabilities_pass():
    found = failures(BlockIO(read, write), Addresses(host_memory_range))
    assert [each.message for each in found] == []


def to_host(cells, count):
    arrays = [wrap(cells[:, :, at : at + 1].copy()) for at in range(count)]
    return lambda: arrays


def from_host(blocks, count):
    given = [np.asarray(block.data).reshape(block.shape) for block in blocks]
    padding = [np.zeros_like(given[0])] * (count - len(given))
    return tensor(wrap(np.concatenate([*given, *padding], 2)))


def test_blocks_that_are_copied_one_by_one_pass():
    copies = {"to_host": to_host, "from_host": from_host}
    assert failures(BlockIO(read, write, **copies), beginning="blocks/") == []


def other_order(cells, count):
    wait = to_host(cells, count)
    return lambda: wait()[::-1]


@pytest.mark.parametrize(
    ("wrong", "beginning"),
    [
        ({"to_host": other_order}, "blocks/read"),
        ({"from_host": lambda blocks, n: from_host(blocks[::-1], n)}, "blocks/write"),
    ],
)
def test_a_copy_that_mixes_up_blocks_is_named(wrong, beginning):
    found = failures(BlockIO(read, write, **wrong), beginning=beginning)
    assert found
    assert "blocks [3, 1, 7, 19, 2]" in found[0].message or "[5, 11" in found[0].message


def test_a_backend_with_another_layout_may_refuse():
    assert failures() == []


def read_slot(state, row):
    return {name: table[row[:1]] for name, table in state.slotted.items()}


def write_slot(state, row, contents):
    for name, table in contents.items():
        state.slotted[name][row[:1]] = table
    return state


def other_slot(state, row, contents):
    return write_slot(state, row % 3 + 1, contents)


def one_name(state, row, contents):
    name = next(iter(contents))
    return write_slot(state, row, {name: contents[name]})


@pytest.mark.parametrize("wrong", [other_slot, one_name])
def test_a_wrong_write_of_a_slot_is_named(wrong):
    capabilities = BlockIO(read, write), SlotIO(read_slot, wrong)
    (found,) = failures(*capabilities, beginning="slots")
    assert "SlotIO: slot" in found.message
    assert failures(BlockIO(read, write), SlotIO(read_slot, write_slot)) == []


def test_a_wrong_address_is_found():
    def beside(x):
        return MemoryRange(x.ctypes.data + 4, x.nbytes - 4, "host")

    (found,) = failures(Addresses(beside), beginning="addresses")
    assert "the address of a tensor" in found.message

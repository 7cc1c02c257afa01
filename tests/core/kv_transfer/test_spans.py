"""Contents that are cut to blocks of another size."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from inl import host_memory
from inl.dtypes import E4M3, HostArray
from inl.errors import ProtocolError
from inl.kv_tiers.record import Identity
from inl.kv_transfer.carried import CarriedSpans
from inl.kv_transfer.spans import Recut, TokenSpan, tokens_digest, transfer_identity
from inl.spec.cache import Slotted
from inl.spec.cache_layout import SLOT_GROUP, BlockLayout, CacheLayout, stored_bits

TOKENS = 48
KINDS = {
    "float32": BlockLayout(2, 4, 3, 5, "float32"),
    "int8": BlockLayout(2, 4, 3, 5, "int8"),
    "float8": BlockLayout(2, 4, 3, 5, E4M3, scales=(1.0, 2.0, 3.0, 4.0)),
}


def whole(layout):
    """Numbers of each part along one axis of tokens."""
    rng = np.random.default_rng(3)
    parts = {}
    for name, part in layout._replace(block_size=TOKENS).parts(1).items():
        if len(part.shape) == 2:
            parts[name] = np.array(layout.scales, np.float32).reshape(part.shape)
        else:
            bits = "uint8" if part.dtype == E4M3 else part.dtype
            parts[name] = rng.integers(0, 100, part.shape).astype(bits)
    return parts


def cut(layout, parts, start, stop):
    """Contents of blocks from token ``start`` to ``stop``."""
    size, found = layout.block_size, {}
    for name, part in layout.parts((stop - start) // size).items():
        data = parts[name]
        if len(part.shape) > 2:
            data = data[:, :, 0, start:stop].reshape(part.shape)
        found[name] = HostArray(np.ascontiguousarray(data), part.dtype, part.shape)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(4, 4), (4, 16), (16, 4), (6, 4), (4, 6), (3, 8)])
def test_blocks_have_the_numbers_of_their_tokens(kind, sizes):
    here, there = (KINDS[kind]._replace(block_size=size) for size in sizes)
    parts, draw = whole(here), Random(1)
    recut, start, blocks = Recut(there), 0, {}
    while start < TOKENS:
        count = min(draw.randint(1, 3) * sizes[0], TOKENS - start)
        span = TokenSpan(0, start, sizes[0], cut(here, parts, start, start + count))
        assert span.stop == start + count
        blocks.update(recut.add(span))
        start += count
    assert sorted(blocks) == list(range(TOKENS // sizes[1]))
    for index, found in blocks.items():
        first = index * sizes[1]
        for name, part in cut(there, parts, first, first + sizes[1]).items():
            assert found[name].shape == part.shape
            assert np.array_equal(stored_bits(found[name]), stored_bits(part))


def test_tokens_after_a_gap_begin_a_whole_block():
    here, there = (KINDS["float32"]._replace(block_size=size) for size in (4, 6))
    parts, recut = whole(here), Recut(there)
    spans = [
        TokenSpan(0, start, 4, cut(here, parts, start, stop))
        for start, stop in ((0, 8), (16, 24), (24, 28), (28, 36))
    ]
    assert [[index for index, _ in recut.add(span)] for span in spans] == [
        [0], [3], [], [4, 5],
    ]  # fmt: skip
    ((_, found),) = Recut(there).add(TokenSpan(0, 16, 4, cut(here, parts, 16, 24)))
    expected = cut(there, parts, 18, 24)["cells"]
    assert np.array_equal(found["cells"].data, expected.data)


@pytest.mark.parametrize(
    "wrong",
    [{"start": 2}, {"start": -4}, {"block_size": 0}, {"block_size": 8}, {"parts": {}}],
)
def test_contents_of_another_layout_are_refused(wrong):
    layout = KINDS["float32"]
    span = TokenSpan(0, 0, 4, cut(layout, whole(layout), 0, 8))
    with pytest.raises(ProtocolError, match="contents"):
        list(Recut(layout).add(span._replace(**wrong)))
    other = Recut(layout._replace(kv_heads=2))
    with pytest.raises(ProtocolError, match="contents"):
        list(other.add(span))


def test_only_the_block_size_may_differ():
    layout = KINDS["float32"]
    own = Identity("model", "float32", (layout,))
    same = own._replace(layouts=(layout._replace(block_size=64),))
    assert transfer_identity(own) == transfer_identity(same)
    others = [
        own._replace(model="other"),
        own._replace(dtype="bfloat16"),
        own._replace(layouts=(layout, layout)),
        own._replace(layouts=(layout._replace(dtype="int8"),)),
        own._replace(layouts=(layout._replace(kv_heads=6),)),
    ]
    digests = {transfer_identity(each) for each in (own, *others)}
    assert len(digests) == 1 + len(others)


def test_a_digest_of_tokens_is_that_of_all_before():
    assert tokens_digest([1, 2, 3], 2) == tokens_digest([1, 2, 9], 2)
    assert tokens_digest([1, 2, 3], 2) != tokens_digest([2, 1, 3], 2)
    assert tokens_digest([1, 2, 3], 4) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_share_no_memory_with_their_message(kind):
    """It is that of the next message then."""
    layout = KINDS[kind]
    parts = whole(layout)
    given = cut(layout, {name: each.copy() for name, each in parts.items()}, 0, TOKENS)
    recut = Recut(layout._replace(block_size=9))
    blocks = dict(recut.add(TokenSpan(0, 0, 4, given)))
    for part in given.values():
        part.data[:] = 0
    wanted = cut(layout._replace(block_size=9), parts, 0, 45)
    for index, found in blocks.items():
        for name, part in found.items():
            right = stored_bits(wanted[name])
            if len(part.shape) > 2:
                right = right[:, :, index : index + 1]
            assert np.array_equal(stored_bits(part), right), name
    assert len(blocks) == 5


def test_a_slot_shares_no_memory_with_its_message():
    state = np.ones(3, np.float32)
    layout = CacheLayout(
        (KINDS["float32"],), (Slotted("state", (3,), "float32", "tokens"),)
    )
    joined = CarriedSpans(SimpleNamespace(block_size=4), layout)
    parts = {"state": HostArray(state, "float32", (3,))}
    joined.add(TokenSpan(SLOT_GROUP, 8, 1, parts))
    state[:] = 0
    assert joined._slot.parts["state"].data.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 5), "uint16"), ((3 << 20,), "uint8")]
)
def test_memory_is_written_as_any_other(shape, dtype):
    memory = host_memory.empty(shape, dtype)
    memory[:] = 7
    assert (memory.shape, memory.dtype) == (shape, np.dtype(dtype))
    assert memory.flags.c_contiguous
    assert (memory == 7).all()

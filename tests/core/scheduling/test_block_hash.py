from __future__ import annotations

import hashlib
import struct

import pytest

from inl.scheduling import block_hash as prefix

FIELDS = {"model": "m", "adapter": 0, "salt": "", "block_size": 2}


def chain(ids, size, **fields):
    keys = [prefix.root(**{**FIELDS, **fields})]
    prefix.extend(keys, ids, size, len(ids) // size)
    return keys[1:]


def test_a_key_is_sha256_of_its_parent_and_little_endian_ids():
    first = hashlib.sha256(prefix.root(**FIELDS) + bytes([1, 0, 0, 0, 0, 1, 0, 0]))
    second = hashlib.sha256(first.digest() + struct.pack("<ii", 70_000, 3))
    assert chain([1, 256, 70_000, 3, 9], 2) == [first.digest(), second.digest()]


def test_a_root_tags_every_field_with_its_name_and_lengths():
    def field(tag, value):
        return struct.pack("<BQ", len(tag), len(value)) + tag + value

    text = (
        field(b"model", b"abc")
        + field(b"adapter", struct.pack("<q", 7))
        + field(b"salt", "é".encode())
        + field(b"block", struct.pack("<q", 16))
    )
    found = prefix.root(model="abc", adapter=7, salt="é", block_size=16)
    assert found == hashlib.sha256(text).digest()


@pytest.mark.parametrize(
    "change", [{"model": "n"}, {"adapter": 1}, {"salt": "s"}, {"block_size": 4}]
)
def test_each_field_sets_prefixes_apart(change):
    assert prefix.root(**{**FIELDS, **change}) != prefix.root(**FIELDS)


def test_text_cannot_move_from_one_field_to_another():
    one = prefix.root(model="ab", adapter=0, salt="c", block_size=2)
    other = prefix.root(model="a", adapter=0, salt="bc", block_size=2)
    assert one != other


def test_a_key_depends_on_everything_before_its_block():
    assert chain([1, 2, 3, 4], 2)[1] != chain([2, 1, 3, 4], 2)[1]
    assert chain([1, 2, 3, 4], 2)[0] == chain([1, 2, 4, 3], 2)[0]


def test_keys_grow_in_parts():
    keys = [prefix.root(**FIELDS)]
    ids = list(range(10))
    for count in range(6):
        prefix.extend(keys, ids, 2, count)
    assert keys[1:] == chain(ids, 2)

from __future__ import annotations

import hashlib
import struct

import pytest

from inl.kv.block_hash import extend_block_hashes, root_hash

FIELDS = {"model_digest": "m", "adapter_digest": "", "cache_salt": "", "block_size": 2}


def chain(ids, size, **fields):
    keys = [root_hash(**{**FIELDS, **fields})]
    extend_block_hashes(keys, ids, size, len(ids) // size)
    return keys[1:]


def test_a_key_is_sha256_of_its_parent_and_little_endian_ids():
    first = hashlib.sha256(root_hash(**FIELDS) + bytes([1, 0, 0, 0, 0, 1, 0, 0]))
    second = hashlib.sha256(first.digest() + struct.pack("<ii", 70_000, 3))
    assert chain([1, 256, 70_000, 3, 9], 2) == [first.digest(), second.digest()]


def test_a_root_tags_every_field_with_its_name_and_lengths():
    def field(tag, value):
        return struct.pack("<BQ", len(tag), len(value)) + tag + value

    text = (
        field(b"model", b"abc")
        + field(b"adapter", b"7f")
        + field(b"salt", "é".encode())
        + field(b"block", struct.pack("<q", 16))
    )
    found = root_hash(
        model_digest="abc", adapter_digest="7f", cache_salt="é", block_size=16
    )
    assert found == hashlib.sha256(text).digest()


@pytest.mark.parametrize(
    "change",
    [
        {"model_digest": "n"},
        {"adapter_digest": "a"},
        {"cache_salt": "s"},
        {"block_size": 4},
    ],
)
def test_each_field_changes_the_root(change):
    assert root_hash(**{**FIELDS, **change}) != root_hash(**FIELDS)


def test_fields_are_delimited():
    one = root_hash(model_digest="ab", adapter_digest="", cache_salt="c", block_size=2)
    other = root_hash(
        model_digest="a", adapter_digest="", cache_salt="bc", block_size=2
    )
    assert one != other


def test_a_key_depends_on_everything_before_its_block():
    assert chain([1, 2, 3, 4], 2)[1] != chain([2, 1, 3, 4], 2)[1]
    assert chain([1, 2, 3, 4], 2)[0] == chain([1, 2, 4, 3], 2)[0]


def test_keys_can_be_extended_in_parts():
    keys = [root_hash(**FIELDS)]
    ids = list(range(10))
    for count in range(6):
        extend_block_hashes(keys, ids, 2, count)
    assert keys[1:] == chain(ids, 2)

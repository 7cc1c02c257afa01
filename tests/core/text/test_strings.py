"""Lazy string arrays, compared with sequential parsing."""

from __future__ import annotations

import random
import struct

import pytest

from inl.text.strings import Strings, scan

PAD = b"before"


def written(texts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(text)) + text for text in texts)


def found_in(data: bytes, count: int) -> Strings | None:
    return scan(PAD + data, len(PAD), len(PAD + data), count)


@pytest.mark.parametrize("seed", range(5))
def test_strings_of_all_lengths_are_located(seed: int) -> None:
    rng = random.Random(seed)
    letters = "abcäß€𝄞 \n\t"
    texts = [
        "".join(rng.choices(letters, k=rng.randint(1, 60 if seed else 5)))
        for _ in range(rng.randint(1, 3000))
    ]
    data = written([text.encode() for text in texts])
    found = found_in(data + struct.pack("<QQ", 3, 0) + b"more", len(texts))
    assert found == texts
    assert found.stop == len(PAD) + len(data)
    assert found[-1] == texts[-1]
    assert found[1:3] == texts[1:3]
    assert len(found) == len(texts)


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        ([b"a", b"", b"b"], "an empty one"),
        ([b"a", b"x" * 256, b"b"], "one of more than 255 bytes"),
        ([b"a", b"x" * 300, b"b"], "one of more than 255 bytes"),
        ([b"a", b"\1" + 7 * b"\0", b"b"], "one that looks like a length"),
        ([b"a", b"\xff", b"b"], "bytes that are no UTF-8"),
        ([b"a", "é".encode()[:1], "é".encode()[1:]], "half a character each"),
    ],
)
def test_ambiguous_input_is_left_to_sequential_parsing(
    texts: list[bytes], why: str
) -> None:
    assert found_in(written(texts), len(texts)) is None, why


@pytest.mark.parametrize("cut", range(1, 20))
def test_truncated_input_is_not_read_past_its_end(cut: int) -> None:
    data = written([b"one", b"two", b"three"])
    assert found_in(data, 3) == ["one", "two", "three"]
    assert found_in(data[:-cut], 3) is None


def test_a_count_above_the_number_of_strings() -> None:
    assert found_in(written([b"one", b"two"]), 3) is None
    assert found_in(b"", 1) is None


def test_wrong_lengths_are_detected() -> None:
    data = bytearray(written([b"abcdefgh", b"ij", b"kl"]))
    data[0] = 7
    assert found_in(bytes(data), 3) is None
    data[0] = 200
    assert found_in(bytes(data), 3) is None

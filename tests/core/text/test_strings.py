"""Lazy string arrays, compared with the strings that were written."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from inl.checkpoints.files.tensor_file import TensorFile
from inl.checkpoints.gguf.header import CHUNK, Header
from inl.errors import CheckpointError
from inl.text.strings import PIECE, Strings, scan, walk

PAD = b"before"


def written(texts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(text)) + text for text in texts)


@pytest.fixture
def found(tmp_path):
    """Reads an array of strings from a file, behind other bytes."""

    def read(data: bytes, count: int) -> Strings:
        path = tmp_path / "strings"
        path.write_bytes(PAD + data)
        return Header(TensorFile(path)).strings(len(PAD), count, "tokens")

    return read


def located(texts: list[bytes]) -> int:
    """Number of the strings that one vectorized pass locates."""
    return len(scan(np.frombuffer(written(texts), np.uint8), len(texts))) - 1


@pytest.mark.parametrize("seed", range(5))
def test_strings_of_all_lengths_are_located(seed, found) -> None:
    rng = random.Random(seed)
    letters = "abcäß€𝄞 \n\t"
    texts = [
        "".join(rng.choices(letters, k=rng.randint(1, 60 if seed else 5)))
        for _ in range(rng.randint(1, 3000))
    ]
    data = written([text.encode() for text in texts])
    strings = found(data + struct.pack("<QQ", 3, 0) + b"more", len(texts))
    assert strings == texts
    assert strings.stop == len(PAD) + len(data)
    assert strings[-1] == texts[-1]
    assert strings[1:3] == texts[1:3]
    assert len(strings) == len(texts)
    assert located([text.encode() for text in texts]) == len(texts)


def test_arrays_of_several_chunks_and_pieces(found) -> None:
    rng = random.Random(0)
    texts = ["x" * rng.randint(0 if at % 997 == 0 else 1, 40) for at in range(70_000)]
    texts[40_000] = "long" * 100
    data = written([text.encode() for text in texts])
    assert len(data) > 1.5 * CHUNK
    assert len(texts) > 2 * PIECE
    strings = found(data, len(texts))
    assert list(strings) == texts
    assert strings.stop == len(PAD) + len(data)


@pytest.mark.parametrize("last", ["a\0", "\0", "", "ä\0" * 9, "plain"])
def test_texts_with_zeros_are_not_taken_for_separators(last, found) -> None:
    texts = ["b", last, "\0c", "", last]
    strings = found(written([text.encode() for text in texts]), len(texts))
    assert list(strings) == [strings[at] for at in range(5)] == texts


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        ([b"a", b"", b"b"], "an empty one"),
        ([b"a", b"x" * 256, b"b"], "one of more than 255 bytes"),
        ([b"a", b"x" * 300, b"b"], "one of more than 255 bytes"),
        ([b"a", b"\1" + 7 * b"\0", b"b"], "one that looks like a length"),
    ],
)
def test_ambiguous_input_is_parsed_sequentially(texts, why, found) -> None:
    assert located(texts) < len(texts), why
    assert found(written(texts), len(texts)) == [text.decode() for text in texts]


@pytest.mark.parametrize(
    "texts", [[b"a", b"\xff", b"b"], [b"a", "é".encode()[:1], "é".encode()[1:]]]
)
def test_invalid_utf8_is_named(texts, found) -> None:
    with pytest.raises(CheckpointError, match=r"tokens: string 1 at byte 15: .*UTF-8"):
        found(written(texts), 3)


@pytest.mark.parametrize("cut", range(1, 20))
def test_truncated_input_is_refused(cut, found) -> None:
    data = written([b"one", b"two", b"three"])
    assert found(data, 3) == ["one", "two", "three"]
    with pytest.raises(CheckpointError, match="the rest of the file"):
        found(data[:-cut], 3)


@pytest.mark.parametrize("data", [written([b"one", b"two"]), b""])
def test_a_count_above_the_number_of_strings(data, found) -> None:
    with pytest.raises(CheckpointError, match="the rest of the file"):
        found(data, 3)


@pytest.mark.parametrize("length", [7, 200])
def test_wrong_lengths_are_detected(length, found) -> None:
    data = bytearray(written([b"abcdefgh", b"ij", b"kl"]))
    data[0] = length
    with pytest.raises(CheckpointError, match="the rest of the file"):
        found(bytes(data), 3)


@pytest.mark.parametrize("every", [20, 300, 5000])
def test_few_bytes_are_searched_twice(every, found, monkeypatch) -> None:
    searched = []

    def counted(block, count):
        bounds = scan(block, count)
        searched.append(len(block))
        return bounds

    monkeypatch.setattr("inl.checkpoints.gguf.header.scan", counted)
    texts = [b"x" * (300 if at % every == 0 else 9) for at in range(200_000)]
    data = written(texts)
    assert list(found(data, len(texts))[-2:]) == ["x" * 9] * 2
    assert sum(searched) < 12 * len(data)


def test_one_long_string_costs_few_steps(found, monkeypatch) -> None:
    walked = []

    def counted(block, count):
        walked.append(count)
        return walk(block, count)

    monkeypatch.setattr("inl.checkpoints.gguf.header.walk", counted)
    texts = [b"x" * (300 if at == 500 else 9) for at in range(50_000)]
    assert len(found(written(texts), len(texts))) == len(texts)
    assert sum(walked) < 100

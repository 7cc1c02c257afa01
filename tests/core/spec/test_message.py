"""Frames: written, read back word by word, and refused."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inl.errors import ProtocolError
from inl.spec.message import (
    ADMISSION_WORD,
    ADMIT,
    HEADER,
    HEADER_WORD,
    MASKED,
    MAX_TOKEN_BIASES,
    RELEASE,
    STEP,
    TOKEN_BIAS,
    VERSION,
    BlockTableUpdate,
    Row,
    TokenBias,
    admit_frame,
    header,
    max_block_table_updates,
    release_frame,
    row_words,
    step_frame,
    token_bias_frame,
)
from inl.spec.step import NEUTRAL, PARAMS, SAMPLERS, Bucket
from outcomes import Outcomes

GROUPS, BLOCK = 2, 4
ids = st.integers(-1, 2**31 - 1)
small = st.integers(0, 2**31 - 1)
uniform = st.floats(0, 1, width=32, exclude_max=True)


@st.composite
def steps(draw):
    """A bucket, and rows and cells that fit it."""
    width = draw(st.integers(1, 3))
    row = st.builds(
        Row,
        small,
        st.lists(ids, max_size=5),
        st.lists(uniform, max_size=2 * width - 1),
        st.lists(ids, max_size=2 * width - 2),
    )
    rows = draw(st.lists(row, max_size=4))
    bucket = Bucket(
        max(1, sum(len(row.tokens) for row in rows) + draw(st.integers(0, 4))),
        max(1, len(rows) + draw(st.integers(0, 2))),
        width,
        draw(st.sampled_from(SAMPLERS)),
    )
    room = max_block_table_updates(bucket, groups=GROUPS, block_size=BLOCK)
    cell = st.builds(BlockTableUpdate, small, small, small, small)
    return bucket, rows, draw(st.lists(cell, max_size=room))


class Words:
    """Reads a frame's bytes from the front, knowing nothing but the documentation."""

    def __init__(self, frame):
        self.bytes = frame.astype("<i4").tobytes()
        self.at = 0

    def take(self, count, code="i"):
        found = struct.unpack_from(f"<{count}{code}", self.bytes, self.at)
        self.at += 4 * count
        return list(found)

    @property
    def left(self):
        return len(self.bytes) // 4 - self.at // 4


@given(steps(), small, st.sampled_from([0, MASKED]))
def test_a_step_comes_back_word_for_word(made, number, flags):
    bucket, rows, cells = made
    frame = step_frame(
        bucket, rows, cells, step=number, groups=GROUPS, block_size=BLOCK,
        decode_rows=min(1, len(rows)), flags=flags,
    )  # fmt: skip
    assert frame.dtype == np.int32
    used = sum(len(row.tokens) for row in rows)
    words = Words(frame)
    assert words.take(HEADER) == [
        VERSION, STEP, number, bucket.tokens, bucket.rows, bucket.tokens_per_row,
        SAMPLERS.index(bucket.sampler), flags, 0, min(1, len(rows)), len(rows), used,
        len(cells), 0, 0, 0,
    ]  # fmt: skip
    for row in rows:
        assert words.take(2) == [row.slot, len(row.tokens)]
        count = 2 * bucket.tokens_per_row - 1
        padding = [0.0] * (count - len(row.uniforms))
        assert words.take(count, "f") == [*row.uniforms, *padding]
        padding = [0] * (count - 1 - len(row.drafts))
        assert words.take(count - 1) == [*row.drafts, *padding]
    unused = (bucket.rows - len(rows)) * (4 * bucket.tokens_per_row - 1)
    assert words.take(unused) == [0] * unused
    for cell in cells:
        assert words.take(4) == list(cell)
    room = GROUPS * (bucket.rows + bucket.tokens // BLOCK)
    unused = 4 * (room - len(cells))
    assert words.take(unused) == [0] * unused
    assert words.take(used) == [token for row in rows for token in row.tokens]
    assert words.take(words.left) == [0] * (bucket.tokens - used)
    found = header(frame)
    assert found.bucket == bucket
    assert (found.kind, found.step, found.flags) == (STEP, number, flags)
    assert (found.used_rows, found.used_tokens) == (len(rows), used)


@given(
    slot=small, length=small, last=ids, adapter=small,
    params=st.dictionaries(st.sampled_from(PARAMS), st.floats(-9, 100, width=32)),
    width=st.integers(1, 5), data=st.data(),
)  # fmt: skip
def test_an_admission_comes_back_word_for_word(
    slot, length, last, adapter, params, width, data
):
    table = st.lists(small, max_size=width)
    blocks = data.draw(st.lists(table, max_size=GROUPS))
    frame = admit_frame(
        slot, blocks, groups=GROUPS, max_blocks_per_seq=width, length=length, last=last,
        adapter=adapter, **params,
    )  # fmt: skip
    assert header(frame).kind == ADMIT
    words = Words(frame)
    assert words.take(HEADER) == [VERSION, ADMIT] + [0] * 14
    assert words.take(4) == [slot, length, last, adapter]
    neutral = zip(PARAMS, NEUTRAL, strict=True)
    given_params = [params.get(name, value) for name, value in neutral]
    assert words.take(len(PARAMS), "f") == given_params
    for group in range(GROUPS):
        given_ids = blocks[group] if group < len(blocks) else []
        assert words.take(width) == given_ids + [0] * (width - len(given_ids))
    assert words.left == 0


def test_a_release_names_the_slot_and_clears_the_rest():
    frame = release_frame(7, groups=GROUPS, max_blocks_per_seq=3)
    expected = [VERSION, RELEASE] + [0] * 14 + [7]
    expected += [0] * (3 + len(PARAMS) + GROUPS * 3)
    assert frame.tolist() == expected
    assert header(frame).kind == RELEASE


marks = st.builds(TokenBias, small, small, st.floats(-1e9, 1e9, width=32))


@given(small, st.lists(marks, max_size=9))
def test_marks_come_back_word_for_word(slot, special):
    frame = token_bias_frame(slot, special)
    assert header(frame).kind == TOKEN_BIAS
    words = Words(frame)
    assert words.take(HEADER) == [VERSION, TOKEN_BIAS] + [0] * 14
    assert words.take(2) == [slot, len(special)]
    for mark in special:
        assert words.take(2) == [mark.token, mark.token_count]
        assert words.take(1, "f") == [mark.bias]
    unused = 3 * (MAX_TOKEN_BIASES - len(special))
    assert words.take(unused) == [0] * unused
    assert words.left == 0


def test_more_marks_than_a_frame_holds_are_refused():
    with pytest.raises(
        ProtocolError, match="token biases: found 257, the frame holds 256"
    ):
        token_bias_frame(1, [TokenBias(token) for token in range(257)])


def test_a_parameter_that_nobody_knows_is_refused():
    with pytest.raises(ProtocolError, match=r"found \['heat'\], accepts temperature"):
        admit_frame(1, [], groups=1, max_blocks_per_seq=3, heat=1.0)


def frame_with(word, value):
    bucket = Bucket(8, 2)
    rows = [Row(1, [5, 6, 7])]
    frame = step_frame(bucket, rows, step=1, groups=1, block_size=4, decode_rows=0)
    frame[word] = value
    return frame


@pytest.mark.parametrize(
    ("word", "value", "sentence"),
    [
        (0, 0x494E4C01, "word 0 (version): found 0x494e4c01, accepts 0x494e4c03"),
        (0, 0, "word 0 (version): found 0x0"),
        (1, 6, "word 1 (kind): found 6, accepts 0 to 5"),
        (1, -1, "word 1 (kind): found -1"),
        (3, 0, "word 3 (tokens): found 0, accepts 1 and more"),
        (3, 2, "word 11 (used_tokens): found 3, accepts up to 2, the header's tokens"),
        (4, -7, "word 4 (rows): found -7"),
        (4, 0, "word 4 (rows): found 0"),
        (5, 0, "word 5 (tokens_per_row): found 0"),
        (6, 3, "word 6 (sampler): found 3, accepts 0 to 2 (greedy"),
        (6, -1, "word 6 (sampler): found -1"),
        (8, 1, "word 8 (repeat): found 1, accepts 0, or 2 and more with one token"),
        (8, 4, "word 8 (repeat): found 4, accepts 0, or 2 and more with one token"),
        (8, -5, "word 8 (repeat): found -5"),
        (9, -1, "word 9 (decode_rows): found -1, accepts 0 and more"),
        (9, 2, "word 9 (decode_rows): found 2, accepts up to 1"),
        (10, 3, "word 10 (used_rows): found 3, accepts up to 2"),
        (11, 9, "word 11 (used_tokens): found 9, accepts up to 8"),
        (12, -1, "word 12 (used_updates): found -1"),
    ],
)
def test_a_bad_word_is_named(word, value, sentence):
    with pytest.raises(ProtocolError, match=re.escape(sentence)):
        header(frame_with(word, value))


@pytest.mark.parametrize(
    "frame",
    [
        np.zeros(HEADER - 1, np.int32),
        np.zeros(0, np.int32),
        np.zeros((HEADER, 2), np.int32),
        np.zeros(HEADER, np.int64),
        np.zeros(HEADER, np.float32),
        np.zeros((), np.int32),
    ],
    ids=lambda frame: f"{frame.dtype}{list(frame.shape)}",
)
def test_what_is_no_frame_is_refused_by_its_shape(frame):
    with pytest.raises(
        ProtocolError, match=r"frame: found .* expected int32 \[words\]"
    ):
        header(frame)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=0, max_size=40))
def test_random_words_are_no_header(words):
    with pytest.raises(ProtocolError):
        header(np.array(words, np.int32))


def test_any_header_gives_a_bucket_or_a_protocol_error(depth):
    outcomes = Outcomes()

    @settings(max_examples=depth(50, 200))
    @given(st.lists(st.integers(-3, 9), min_size=12, max_size=12))
    @example([RELEASE, *[0] * 11])
    def check(words):
        frame = np.zeros(HEADER, np.int32)
        frame[: len(words) + 1] = [VERSION, *words]
        with outcomes.refused_by(ProtocolError):
            check_bucket(header(frame))

    check()
    outcomes.check()


def check_bucket(found):
    if found.kind == STEP:
        bucket = found.bucket
        assert min(bucket.tokens, bucket.rows, bucket.tokens_per_row) >= 1
        assert 0 <= found.used_rows <= bucket.rows
        assert 0 <= found.used_tokens <= bucket.tokens


@pytest.mark.parametrize(
    ("bucket", "rows", "cells", "sentence"),
    [
        (
            Bucket(9, 1),
            [Row(1, [5]), Row(2, [6])],
            0,
            "rows: found 2, the frame holds 1",
        ),
        (Bucket(2, 1), [Row(1, [5, 6, 7])], 0, "tokens: found 3, the frame holds 2"),
        (
            Bucket(4, 1),
            [Row(1, [5])],
            3,
            "block table updates: found 3, the frame holds 2",
        ),
    ],
)
def test_what_does_not_fit_the_bucket_is_refused(bucket, rows, cells, sentence):
    given_cells = [BlockTableUpdate(0, 1, place, 1 + place) for place in range(cells)]
    with pytest.raises(ProtocolError, match=sentence):
        step_frame(
            bucket, rows, given_cells, step=0, groups=1, block_size=4, decode_rows=0
        )


def test_a_table_longer_than_the_width_is_refused():
    with pytest.raises(ProtocolError, match=r"blocks of a sequence: found 4.* holds 3"):
        admit_frame(1, [[1, 2, 3, 4]], groups=1, max_blocks_per_seq=3)


def test_a_frame_of_512_decoding_rows_is_small():
    rows = [Row(slot, [-1], [0.5]) for slot in range(1, 513)]
    frame = step_frame(
        Bucket(512, 512), rows, step=0, groups=1, block_size=16, decode_rows=512
    )
    # 512 rows of 3 words and a token each are 8 KiB; the rest is room for cells.
    assert frame.nbytes <= 4 * (HEADER + 512 * 4 + 4 * (512 + 32))


@pytest.mark.parametrize(
    ("word", "value", "sentence"),
    [
        ("stop_ids", 9, "frame word 13 (stop_ids): found 9, accepts 0, or 1 and more"),
        ("uniforms", 9, "frame word 14 (uniforms): found 9, accepts 0, or 2 * W - 1"),
        ("stop_ids", -1, "frame word 13 (stop_ids): found -1"),
    ],
)
def test_sizes_of_rows_are_for_steps_that_use_them(word, value, sentence):
    frame = step_frame(Bucket(4, 2), (), step=1, groups=1, block_size=4, decode_rows=0)
    frame[getattr(HEADER_WORD, word)] = value
    with pytest.raises(ProtocolError, match=re.escape(sentence)):
        header(frame)


def test_a_reserved_word_is_0():
    frame = step_frame(Bucket(4, 2), (), step=1, groups=1, block_size=4, decode_rows=0)
    frame[15] = 1
    with pytest.raises(ProtocolError, match="a reserved word of the header"):
        header(frame)


def test_rows_may_have_more_uniform_numbers():
    bucket = Bucket(tokens=6, rows=2, tokens_per_row=3, uniforms=9)
    rows = [Row(1, [-1, -2], [at / 10 for at in range(9)], range(20, 28))]
    frame = step_frame(bucket, rows, step=1, groups=1, block_size=4, decode_rows=1)
    assert header(frame).bucket == bucket
    record = frame[16 : 16 + row_words(bucket)]
    assert len(record) == 2 + 9 + 8
    assert record[2:11].view(np.float32).tolist() == [
        float(np.float32(at / 10)) for at in range(9)
    ]
    assert record[11:].tolist() == list(range(20, 28))


def test_no_word_of_an_admission_moves():
    """The contract promises it: a later parameter has a frame of its own."""
    assert ADMISSION_WORD == (16, 17, 18, 19, 20, 27)
    assert len(PARAMS) == 7

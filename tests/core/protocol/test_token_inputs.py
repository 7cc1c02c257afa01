"""Inputs of tokens in frames: they come back as given, and damaged ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from inl.dtypes import HostArray, widen
from inl.errors import ProtocolError
from inl.protocol.frame_check import FrameCheck
from inl.protocol.frame_decoder import read_step
from inl.protocol.runner import Limits
from inl.spec.embedded_rows import (
    EmbeddedRows,
    read_inputs,
    token_inputs,
    with_inputs,
)
from inl.spec.message import header
from inl.testing.play import admission, one_step

LIMITS = Limits(
    slots=4, blocks=(17,), block_size=4, max_blocks_per_seq=8, vocab=50, embedding=3,
    axes=2, spans=True, feature_layers=(0, 2),
)  # fmt: skip
ROWS = {2: np.arange(3.0), 3: np.ones(3)}
FEATURES = {3: np.arange(6.0).reshape(2, 3)}
OFFSETS = {0: (0, 1), 3: (-2, 5)}
SPANS = {2: (2, 4), 3: (2, 4)}


def made(limits=LIMITS, *, rows=ROWS, offsets=OFFSETS, spans=SPANS):
    """A step of five tokens of one row, with inputs, and these."""
    frame = one_step(limits, [(1, [5, 6, 7, 8, 9])], step=1, decoding=0)
    inputs = token_inputs(limits, rows, FEATURES, offsets, spans)
    return with_inputs(frame, inputs, limits), inputs, len(frame)


def checked(frame, limits=LIMITS):
    check = FrameCheck(limits)
    check.read(admission(limits, 1, range(1, 9)))
    return check.read(frame)


THIRDS = {2: np.full(3, 1 / 3), 3: np.ones(3)}
"""Rows that are no numbers of bfloat16, unlike ``ROWS``."""


@pytest.mark.parametrize("rows", [ROWS, THIRDS], ids=["bfloat16", "float32"])
def test_inputs_come_back(rows):
    frame, inputs, size = made(rows=rows)
    found = read_inputs(frame, size, 5, LIMITS)
    for got, given in zip(found, inputs, strict=True):
        if isinstance(given, HostArray):
            got, given = widen(got), given.data
        assert np.array_equal(got, given)
    assert checked(frame).used_tokens == 5
    decoded = read_step(frame, header(frame), LIMITS)
    assert decoded.has_more_inputs
    assert {at: row.tolist() for at, row in decoded.embeddings.items()} == {
        at: row.astype(np.float32).tolist() for at, row in rows.items()
    }


def test_inputs_are_dense_on_the_device():
    _, inputs, _ = made()
    dense = EmbeddedRows(*map(widen, inputs.dense(6, LIMITS)))
    assert dense.kept[:, 0].tolist() == [1, 1, 0, 0, 1, 1]
    assert dense.rows[2].tolist() == [0, 1, 2]
    assert dense.offsets.tolist() == [[0, 0, 0, -2, 0, 0], [1, 0, 0, 5, 0, 0]]
    assert dense.spans.tolist() == [[0, 0]] * 2 + [[2, 4]] * 2 + [[0, 0]] * 2
    assert dense.features.shape == (2, 6, 3)
    assert dense.features[:, 3].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not dense.features[:, 2].any()


@pytest.mark.parametrize(("rows", "words"), [(ROWS, 2), (THIRDS, 3)])
def test_a_runner_of_embeddings_alone_has_the_frames_of_before(rows, words):
    plain = Limits(
        slots=4, blocks=(17,), block_size=4, max_blocks_per_seq=8, vocab=50,
        embedding=3,
    )  # fmt: skip
    frame = one_step(plain, [(1, [5, 6, 7, 8, 9])], step=1, decoding=0)
    longer = with_inputs(frame, token_inputs(plain, rows), plain)
    assert longer[len(frame) :].tolist()[:2] == [2, 3]
    assert len(longer) == len(frame) + 2 + 2 * words
    dense = read_inputs(longer, len(frame), 5, plain).dense(5, plain)
    assert dense.offsets is None
    assert dense.spans is None
    assert dense.features is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": {0: (0, -1)}}, "position along an axis: found -1"),
        ({"offsets": {0: (0, 33)}}, "position along an axis: found 33"),
        ({"spans": {2: (2, 6)}}, "found spans"),
        ({"spans": {2: (3, 5)}}, "found spans"),
        ({"spans": {2: (2, 2)}}, "found spans"),
        ({"spans": {2: (-1, 4)}}, "found spans"),
        ({"rows": {2: np.full(3, np.nan)}}, "found inf or nan"),
        ({"rows": {5: np.ones(3)}}, "accepts ascending ones below 5"),
        ({"offsets": {5: (0, 0)}, "spans": {}}, "accepts ascending ones below 5"),
    ],
)
def test_wrong_inputs_are_refused(changes, message):
    frame, *_ = made(**changes)
    with pytest.raises(ProtocolError, match=message):
        checked(frame)


@pytest.mark.parametrize("count", [-1, 0, 1, 2**31 - 1])
@pytest.mark.parametrize("word", [0, 1])
def test_wrong_counts_are_refused(word, count):
    frame, _, size = made()
    damaged = frame.copy()
    damaged[size + word] = count
    with pytest.raises(ProtocolError, match="inputs of a step: found"):
        checked(damaged)


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_frames_that_end_early_are_refused(cut):
    frame, _, size = made()
    with pytest.raises(ProtocolError):
        checked(frame[: max(len(frame) - cut, size)])


def test_a_span_of_a_later_chunk_begins_in_it():
    check = FrameCheck(LIMITS)
    check.read(admission(LIMITS, 1, range(1, 9)))
    check.read(one_step(LIMITS, [(1, [1, 2, 3])], step=1, decoding=0))
    frame = one_step(LIMITS, [(1, [4, 5, 6])], step=2, decoding=0)
    split = with_inputs(frame, token_inputs(LIMITS, {}, spans={0: (2, 5)}), LIMITS)
    with pytest.raises(ProtocolError, match="all of whose tokens are in this step"):
        check.read(split)
    whole = with_inputs(frame, token_inputs(LIMITS, {}, spans={1: (4, 6)}), LIMITS)
    assert check.read(whole).used_tokens == header(whole).used_tokens == 3

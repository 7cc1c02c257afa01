"""Reads and writes of per-slot state."""

from __future__ import annotations

import numpy as np
import pytest

from inl.ops import catalog
from inl.ops.attention import random_step

READ, WRITE = catalog()["read_slots"].body, catalog()["write_slots"].body


@pytest.fixture
def step():
    """Two decoding rows in slots 3 and 1, a chunk in slot 2, and padding."""
    found, _ = random_step(
        np.random.default_rng(1), [3, 8, 2], [1, 1, 3], pad_rows=2, pad_tokens=2
    )
    return found._replace(slots=np.array([3, 1, 2, 0, 0], np.int32))


def table():
    return 10.0 * np.arange(4)[:, None] + np.arange(2)


def test_generated_tokens_read_their_slot(step):
    found = READ(table() + 1, step)
    assert found.tolist() == [[31, 32], [11, 12]] + [[0, 0]] * 5


def test_padding_tokens_read_zeros():
    """Padding tokens have row 0, a decoding row."""
    step, _ = random_step(np.random.default_rng(2), [4], [1], pad_tokens=3)
    assert READ(table() + 1, step).tolist() == [[11, 12]] + [[0, 0]] * 3


def test_the_last_token_of_each_row_is_written(step):
    x = 100.0 + np.arange(14).reshape(7, 2)
    found = WRITE(x, table(), step)
    assert found.tolist() == [[0, 0], [102, 103], [108, 109], [100, 101]]


def test_other_slots_do_not_change():
    step, _ = random_step(np.random.default_rng(3), [4], [2], pad_rows=1)
    step = step._replace(slots=np.array([2, 0], np.int32))
    found = WRITE(np.ones((2, 2)), table(), step)
    assert np.array_equal(found[[1, 3]], table()[[1, 3]])


def test_slotted_state_may_have_several_axes(step):
    held = np.random.default_rng(0).standard_normal((4, 2, 3))
    found = READ(WRITE(READ(held, step), held, step), step)
    assert np.array_equal(found[:2], held[[3, 1]])
    assert not found[2:].any()

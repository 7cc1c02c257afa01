"""Scores of rows with invalid logits, for which ``sample`` returns token -1."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from inl_cpu.kernels.sample import score


@pytest.mark.parametrize("vocabulary", [5, 20, 300])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [1, 3, None])
def test_invalid_rows_do_not_affect_other_rows(backend, rng, vocabulary, value, count):
    logits = rng.standard_normal((3, vocabulary)).astype(np.float32)
    tokens = np.array([0, 4, 2], np.int32)
    expected = score(backend.emitter, logits, tokens)
    invalid = logits.copy()
    invalid[1, :count] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = score(backend.emitter, invalid, np.array([0, -1, 2], np.int32))
    for before, after in zip(expected, found, strict=True):
        assert np.array_equal(before[[0, 2]], after[[0, 2]])
    assert ((found[1] >= 0) & (found[1] < vocabulary)).all()

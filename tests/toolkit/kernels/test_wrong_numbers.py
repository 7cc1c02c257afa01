"""Wrong types, NaN and huge numbers in every argument of the functions of arrays."""

from __future__ import annotations

import numpy as np
import pytest

from inl import kernels
from inl.errors import InlError
from inl.functional import moe

X, LOGITS = np.ones((4, 8), np.float32), np.ones((4, 3), np.float32)
BLOCKS, PAIRS = np.ones((2, 4, 4), np.float32), [[0, 0], [1, 1]]
WEIGHTS, IDS = np.ones((3, 5, 8), np.float32), np.zeros((4, 1), np.int32)
HALF = X[:, :4]
ARRAYS = [None, "x", -1, 2.5, float("nan"), 10**400, [], {}, True, 1j, object()]
NUMBERS = ["x", float("nan"), float("inf"), 10**400, [], {}, True, 1j, object()]
SIZES = [*NUMBERS, None, 2.5, -1]


def sparse(dense=X, values=BLOCKS, indices=PAIRS, columns=8):
    return kernels.block_sparse_matmul(dense, values, indices, columns=columns)


CASES = {
    "query": (lambda v: kernels.flash_attention(v, X, X), ARRAYS),
    "scale": (lambda v: kernels.flash_attention(X, X, X, scale=v), NUMBERS),
    "window": (
        lambda v: kernels.flash_attention(X, X, X, window=v),
        [each for each in SIZES if each not in (None, 10**400)],
    ),
    "tile": (
        lambda v: kernels.flash_attention(X, X, X, block_size=v),
        [each for each in SIZES if each is not None],
    ),
    "a": (lambda v: kernels.gemm(v, X.T), ARRAYS),
    "x": (kernels.layer_norm, ARRAYS),
    "eps": (lambda v: kernels.layer_norm(X, eps=v), [*NUMBERS, None, -1]),
    "length": (lambda v: kernels.create_rope_cache(v, 8), SIZES),
    "dim": (lambda v: kernels.create_rope_cache(4, v), [*SIZES, 0]),
    "theta": (lambda v: kernels.create_rope_cache(4, 8, theta=v), [*NUMBERS, 0, -1]),
    "rotated": (lambda v: kernels.apply_rope(v, HALF, HALF), ARRAYS),
    "cosines": (lambda v: kernels.apply_rope(X, v, HALF), ARRAYS),
    "sines": (lambda v: kernels.apply_rope(X, HALF, v), ARRAYS),
    "dense": (lambda v: sparse(dense=v), ARRAYS),
    "values": (lambda v: sparse(values=v), ARRAYS),
    "indices": (lambda v: sparse(indices=v), ARRAYS),
    "columns": (lambda v: sparse(columns=v), [*SIZES, 0]),
    "inputs": (lambda v: moe.moe_dispatch(v, LOGITS, WEIGHTS), ARRAYS),
    "logits": (lambda v: moe.moe_dispatch(X, v, WEIGHTS), ARRAYS),
    "experts": (lambda v: moe.moe_dispatch(X, LOGITS, v), ARRAYS),
    "k": (lambda v: moe.moe_dispatch(X, LOGITS, WEIGHTS, k=v), [*SIZES, 0]),
    "factor": (
        lambda v: moe.moe_dispatch(X, LOGITS, WEIGHTS, capacity_factor=v),
        [*NUMBERS, None, 0, -1],
    ),
    "routed": (lambda v: moe.route(v, k=1), ARRAYS),
    "ids": (lambda v: moe.experts(X, v, np.ones((4, 1)), WEIGHTS), ARRAYS),
    "weights": (lambda v: moe.experts(X, IDS, v, WEIGHTS), ARRAYS),
    "balance": (moe.load_balance_loss, ARRAYS),
    "dispatched": (lambda v: moe.capacity(v, 3, capacity_factor=1.0), ARRAYS),
    "count": (
        lambda v: moe.capacity(moe.route(LOGITS, k=1), v, capacity_factor=1.0),
        [*SIZES, 0],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_is_refused_with_a_sentence(name):
    call, wrong = CASES[name]
    for value in wrong:
        with pytest.raises(InlError, match=r"found .*, accepted: "):
            call(value)

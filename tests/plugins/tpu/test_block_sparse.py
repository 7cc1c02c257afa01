"""Block-sparse products and attention in the TPU simulator."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from inl.errors import KernelError
from inl.kernels import block_sparse_matmul, flash_attention
from inl_jax.pallas import block_sparse
from inl_jax.pallas import block_sparse_attention as sparse
from tpu_simulator import races, simulated

FULL = pytest.mark.full
# Blocks of one row are a whole number of registers, or are padded.
MASK = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]], bool)


@pytest.mark.parametrize("size", [128, 48])
@pytest.mark.parametrize("pairs", [[(2, 0), (0, 0), (1, 3)], []])
def test_products_equal_those_of_float64(pairs, size):
    rng = np.random.default_rng(3)
    dense = rng.standard_normal((9, 3 * size)).astype(np.float32)
    values = rng.standard_normal((len(pairs), size, size)).astype(np.float32)
    indices = np.array(pairs, np.int32).reshape(-1, 2)
    wide = dense.astype(np.float64), values.astype(np.float64)
    exact = block_sparse_matmul(*wide, indices, columns=4 * size)
    found = block_sparse.block_sparse_matmul(
        jnp.asarray(dense), jnp.asarray(values), indices, columns=4 * size,
        interpret=simulated(),
    )  # fmt: skip
    assert not races()
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)
    assert block_sparse.visits_of(indices, 4).shape[1] == len(pairs) + 4 - len(
        set(indices[:, 1].tolist())
    )


def operands(seed, lengths, dim, block, mask, dtype):
    """Queries, keys and values; blocks that no query sees are NaN.

    Returns them in a dtype, and rounded to it in float64, with 0 for NaN.
    """
    rng = np.random.default_rng(seed)
    query, keys = (rng.standard_normal((2, length, dim)) for length in lengths)
    values = rng.standard_normal((2, lengths[1], dim - 8))
    for column in np.flatnonzero(~mask.any(0)):
        for each in (keys, values):
            each[:, column * block : (column + 1) * block] = np.nan
    given = [jnp.asarray(each, dtype) for each in (query, keys, values)]
    exact = [np.asarray(each.astype("float32"), np.float64) for each in given]
    return given, [np.nan_to_num(each) for each in exact]


def check(mask, *, causal=False, block=128, dtype="float32", seed=0, lengths=None):
    """Compare with the float64 body; the last blocks are shorter."""
    lengths = lengths or tuple(block * count - 7 for count in mask.shape)
    given, exact = operands(seed, lengths, 72, block, mask, dtype)
    options = {"causal": causal, "block_size": block, "scale": 0.2}
    wanted = flash_attention(*exact, block_mask=mask, **options)
    found = sparse.block_sparse_attention(
        *given, mask, **options, interpret=simulated(seed)
    )
    assert not races()
    assert found.dtype == dtype
    most = 2e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(found.astype("float32"), wanted, rtol=most, atol=most)


@pytest.mark.parametrize(
    ("mask", "more"),
    [
        (MASK, {"causal": True}),
        (MASK, {"block": 48, "dtype": "bfloat16"}),
        pytest.param(MASK[:, :2], {"block": 200, "causal": True}, marks=FULL),
        pytest.param(
            MASK[:2], {"causal": True, "lengths": (250, 370), "seed": 1}, marks=FULL
        ),
        pytest.param(np.zeros((2, 2), bool), {"seed": 2}, marks=FULL),
    ],
)
def test_attention_equals_the_float64_body(mask, more):
    """Some queries see no key at all; keys of blocks that are not stored are NaN."""
    check(mask, **more)


def test_blocks_are_visited_where_they_are_stored():
    shape = sparse.Shape(128, 128, 384, 0, causal=False, scale=1.0)
    visits = sparse.Visits(*sparse.visits_of(MASK, shape))
    assert list(zip(visits.query, visits.key, visits.added, strict=True)) == [
        (0, 0, 1), (0, 2, 1), (1, 0, 0), (2, 1, 1), (2, 2, 1),
    ]  # fmt: skip
    # Of causal queries, block (0, 2) has no key; the diagonal is masked.
    visits = sparse.Visits(*sparse.visits_of(MASK, shape._replace(causal=True)))
    assert list(zip(visits.query, visits.key, visits.masked, strict=True)) == [
        (0, 0, 1), (1, 0, 0), (2, 1, 0), (2, 2, 1),
    ]  # fmt: skip


def fewer(visits):
    """Skip a stored block."""
    visits[4, 1] = 0


def other(visits):
    """Read a block that is not stored."""
    visits[1, 0] = 1


def unmasked(visits):
    visits[5] = 0


@pytest.mark.parametrize("fault", [fewer, other, unmasked])
def test_a_wrong_visit_is_found(monkeypatch, fault):
    right = sparse.visits_of

    def wrong(*args):
        visits = right(*args)
        fault(visits)
        return visits

    monkeypatch.setattr(sparse, "visits_of", wrong)
    with pytest.raises(AssertionError):
        check(np.array([[1, 0, 1]], bool), causal=fault is unmasked, lengths=(121, 377))


def test_a_mask_of_another_shape_is_refused():
    x = jnp.zeros((1, 256, 64))
    with pytest.raises(KernelError, match=r"found \[3, 3\], accepted: \[2, 2\]"):
        sparse.block_sparse_attention(x, x, x, MASK)

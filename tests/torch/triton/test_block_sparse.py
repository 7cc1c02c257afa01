"""Block-sparse products in Triton, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_place import DTYPES, PLACE

from inl.kernels import block_sparse_matmul
from inl.spec import block_structure
from inl_torch.registered import dynamics

# isort: split
from inl_torch.triton.sparse import products

BOUNDS = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1e-3}


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Use the kernels on this device; counts copies to it, and launches."""
    block_structure._structure.cache_clear()
    found = {"copies": 0, "multiply": 0, "sample": 0}

    def counted(name, plain):
        def call(*args):
            found[name] += 1
            return plain(*args)

        return call

    monkeypatch.setattr(dynamics, "TRITON_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(products, "_copied", counted("copies", products._copied))
    for name in ("multiply", "sample"):
        monkeypatch.setattr(products, name, counted(name, getattr(products, name)))
    return found


def matrix_of(values, indices, rows, columns):
    size = values.shape[-1]
    matrix = torch.zeros(rows, columns, dtype=values.dtype)
    for (row, column), block in zip(indices, values, strict=True):
        matrix[row * size :, column * size :][:size, :size] = block
    return matrix


def operands(size, dtype, rows=(3, 7), shape=(3, 2)):
    """Blocks in any order, a column without one, and a row that is no tile."""
    rng = np.random.default_rng(size)
    every = [(i, j) for i in range(shape[0]) for j in range(shape[1]) if j != 1]
    indices = rng.permutation(np.array([*every, (1, 1)] if shape[1] > 2 else every))
    new = lambda *s: torch.from_numpy(rng.standard_normal(s)).to(dtype)  # noqa: E731
    inner, columns = shape[0] * size, shape[1] * size
    return new(*rows, inner), new(len(indices), size, size), indices, columns


def off(found, exact):
    return ((found.double().cpu() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 48, 128])
def test_products_and_gradients(size, dtype, launches):
    x, values, indices, columns = operands(size, getattr(torch, dtype))
    weights = torch.from_numpy(
        np.random.default_rng(1).standard_normal((3, 7, columns))
    )
    held = [each.to(PLACE).requires_grad_() for each in (x, values)]
    found = block_sparse_matmul(*held, indices, columns=columns)
    assert found.dtype == x.dtype
    gradients = torch.autograd.grad(found, held, weights.to(PLACE, x.dtype))
    exact = [each.double().requires_grad_() for each in (x, values)]
    wanted = exact[0] @ matrix_of(exact[1], indices, x.shape[-1], columns)
    rounded = weights.to(x.dtype).double()
    expected = torch.autograd.grad(wanted, exact, rounded)
    assert off(found, wanted) < BOUNDS[dtype]
    for one, other in zip(gradients, expected, strict=True):
        assert off(one, other) < BOUNDS[dtype]
    assert (launches["multiply"], launches["sample"]) == (2, 1)


def test_lists_are_made_and_copied_once(launches, monkeypatch):
    x, values, indices, columns = operands(16, torch.float32, rows=(5,))
    x, values = x.to(PLACE), values.to(PLACE)
    for turn in range(2):
        # Equal indices in other arrays, and in lists.
        held = indices.tolist() if turn else indices.copy()
        block_sparse_matmul(x, values, held, columns=columns)
        if not turn:
            first = launches["copies"]
            monkeypatch.setattr(np, "unique", None)
            monkeypatch.setattr(np, "lexsort", None)
    assert launches == {"copies": first, "multiply": 2, "sample": 0}
    assert first == 4


def test_second_derivatives(launches):
    x, values, indices, columns = operands(16, torch.float32, rows=(6,))

    def second(x, values, run):
        held = [each.requires_grad_() for each in (x, values)]
        gradients = torch.autograd.grad(
            (run(*held) ** 3).sum(), held, create_graph=True
        )
        total = sum((each**2).sum() for each in gradients)
        return torch.autograd.grad(total, held)

    def sparse(x, values):
        return block_sparse_matmul(x, values, indices, columns=columns)

    def plain(x, values):
        return x @ matrix_of(values, indices, x.shape[-1], columns)

    wanted = second(x.double(), values.double(), plain)
    found = second(x.to(PLACE), values.to(PLACE), sparse)
    for one, other in zip(found, wanted, strict=True):
        assert off(one, other) < 1e-5
    assert launches["multiply"] > 4
    assert launches["sample"] > 1


def test_autocast_rounds_the_operands():
    x, values, indices, columns = operands(16, torch.float32, rows=(6,))
    with torch.autocast(PLACE, torch.bfloat16):
        found = block_sparse_matmul(
            x.to(PLACE), values.to(PLACE), indices, columns=columns
        )
    assert found.dtype == torch.bfloat16
    exact = x.double() @ matrix_of(values.double(), indices, x.shape[-1], columns)
    assert 1e-4 < off(found, exact) < 1e-2


@pytest.mark.parametrize("count", [0, 1])
def test_columns_without_blocks_are_zero(count):
    x, values = torch.ones(3, 32, device=PLACE), torch.ones(count, 16, 16, device=PLACE)
    places = np.array([[1, 2]])[:count]
    found = block_sparse_matmul(x, values, places, columns=64)
    assert found[:, :32].abs().sum() == 0
    assert found[:, 48:].abs().sum() == 0
    assert (found[:, 32:48] == 16 * count).all()


def test_other_arrays_use_the_formula(launches):
    """Float64, blocks that are no multiple of 16, and transforms of torch."""
    for size, dtype in ((16, torch.float64), (3, torch.float32)):
        x, values, indices, columns = operands(size, dtype, rows=(4,))
        x, values = x.to(PLACE), values.to(PLACE)
        found = block_sparse_matmul(x, values, indices, columns=columns)
        matrix = matrix_of(values.cpu(), indices, x.shape[-1], columns)
        assert off(found, x.cpu().double() @ matrix.double()) < 1e-6
    x, values, indices, columns = operands(16, torch.float32, rows=(4,))
    x, values = x.to(PLACE), values.to(PLACE)
    call = lambda x: block_sparse_matmul(x, values, indices, columns=columns)  # noqa: E731
    before = launches["multiply"]
    batched = torch.func.vmap(call)(x[:, None])[:, 0]
    assert launches["multiply"] == before == 0
    assert off(batched, call(x).double().cpu()) < 1e-5

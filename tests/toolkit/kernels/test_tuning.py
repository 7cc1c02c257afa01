"""Tuned kernels and tiled layouts, on every kind of array."""

from __future__ import annotations

import importlib
import importlib.util

import numpy as np
import pytest

from inl.errors import KernelError, RequestError
from inl.kernels import KernelConfig, cpu_kernel, flash_attention, gemm, sparse_kernel
from inl.optimizers import autotune, from_tiles, to_tiles
from inl_toolkit.kernels.config import configured

tuning = importlib.import_module("inl_toolkit.optimizers.autotune")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only kernels advance: by 10 / their block size."""
    now = [0.0]
    monkeypatch.setattr(tuning, "perf_counter", lambda: now[0])

    def spend():
        now[0] += 10 / (configured().block_size or 1)

    return spend


def test_the_fastest_configuration_is_applied(clock):
    @cpu_kernel
    def product(a, b):
        clock()
        return gemm(a, b)

    a = np.random.default_rng(0).standard_normal((24, 24)).astype(np.float32)
    found = autotune(product, a, a, search={"block_size": [2, 8, 4]})
    assert found.best.fields == {"block_size": 8}
    assert product.config == KernelConfig(block_size=8)
    assert [trial.seconds for trial in found.trials] == [10, 5, 1.25, 2.5]
    assert all(trial.error < 1e-6 for trial in found.trials)


def test_other_numbers_and_errors_are_rejected(clock):
    @cpu_kernel
    def product(a, b):
        clock()
        return gemm(a, b)

    a = np.random.default_rng(0).standard_normal((24, 24)).astype(np.float32)
    search = {"block_size": [4, -1], "precision": ["default", "float8_e4m3fn"]}
    found = autotune(product, a, a, search=search)
    assert product.config == KernelConfig(block_size=4)
    why = {str(trial.fields): trial.rejected for trial in found.trials}
    rounded = why["{'block_size': 4, 'precision': 'float8_e4m3fn'}"]
    assert rounded.startswith("differs by 0.0")
    assert "block_size: found -1" in why["{'block_size': -1, 'precision': 'default'}"]
    coarse = {"precision": ["float8_e4m3fn"]}
    found = autotune(product, a, a, search=coarse, tolerance=0.5)
    assert found.trials[1].rejected == ""


def test_a_failure_leaves_the_configuration(clock):
    kernel = cpu_kernel(block_size=3)(lambda a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        autotune(kernel, np.ones(2), search={"block_size": [4]})
    assert kernel.config.block_size == 3


def test_jax_kernels_are_compiled_again():
    jnp = pytest.importorskip("jax.numpy")
    q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 4)), "float32")
    sizes = []

    @cpu_kernel
    def attention(q):
        sizes.append(configured().block_size)
        return flash_attention(q, q, q)

    found = autotune(attention, q, search={"block_size": [4, 2]}, repeat=1)
    assert {4, 2} <= {*sizes}
    assert attention.config.block_size == found.best.fields.get("block_size")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_kernels_of_one_function_have_programs_of_their_own(framework):
    module = pytest.importorskip({"jax": "jax.numpy"}.get(framework, framework))
    a = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    x = module.asarray(a)

    def product(x):
        return gemm(x, x)

    for fields in ({"use_bfloat16": True}, {"use_fp16": True}):
        kernel = cpu_kernel(**fields)(product)
        off = np.abs(np.asarray(kernel(x)) - np.asarray(gemm(x, x, **fields))).max()
        assert off < 1e-5
        assert framework in kernel.compiled
        assert np.abs(np.asarray(kernel(x)) - a @ a).max() > 1e-4


def test_blocks_of_another_size_are_refused():
    kernel = sparse_kernel(platform="cpu", block_size=16)(lambda x, values: x)
    x = np.ones((2, 32), np.float32)
    assert kernel(x, np.ones((3, 16, 16))).shape == x.shape
    with pytest.raises(KernelError, match=r"found blocks of \[8, 8\], accepted: \[16"):
        kernel(x, np.ones((3, 8, 8)))


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("sides", [(6, 8), (5, 7), (1, 3)])
def test_tiles(framework, sides):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    x = np.arange(2 * sides[0] * sides[1] * 3, dtype=np.float32)
    x = x.reshape(2, *sides, 3)
    module = importlib.import_module({"jax": "jax.numpy"}.get(framework, framework))
    held = module.asarray(x)
    tiles = to_tiles(held, tile=2)
    assert type(tiles) is type(held)
    rows, columns = (-(-side // 2) for side in sides)
    assert tuple(tiles.shape) == (2, rows, columns, 2, 2, 3)
    grown = np.zeros((2, 2 * rows, 2 * columns, 3), np.float32)
    grown[:, : sides[0], : sides[1]] = x
    for row in range(rows):
        for column in range(columns):
            part = grown[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert np.array_equal(np.asarray(tiles[:, row, column]), part)
    assert np.array_equal(np.asarray(from_tiles(tiles, *sides)), x)


def test_other_layouts_are_refused():
    x = np.ones((1, 5, 4, 1))
    for call, message in (
        (lambda: to_tiles(x[0]), r"found \[5, 4, 1\]"),
        (lambda: to_tiles(x, tile=0), "tiles of 0"),
        (lambda: to_tiles(x, tile=4, pad=False), "or pad=True"),
        (lambda: from_tiles(to_tiles(x, tile=4), 9, 4), "for 9 x 4"),
        (lambda: from_tiles(x, 4, 4), r"found \[1, 5, 4, 1\]"),
    ):
        with pytest.raises(RequestError, match=message):
            call()

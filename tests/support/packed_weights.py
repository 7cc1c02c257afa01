"""Starts of a model whose packed weights are cached, and checks of what they load."""

from __future__ import annotations

import numpy as np

from inl.backend.weight_cache import FileIdentity
from inl.checkpoints.blocks.dtypes import dequantize
from inl.dtypes import HostArray
from inl_cpu.abi import Flag
from inl_cpu.kernels.dense import Products
from inl_cpu.matrix import pack_pairs, pack_rows
from inl_cpu.weight_cache import PackedWeightCache

COLUMNS = 256


def q4_0(rng, rows):
    """Rows of random codes with finite scales."""
    blocks = rng.integers(0, 256, (rows, COLUMNS // 32, 18), np.uint8)
    scales = rng.uniform(-1, 1, (rows, COLUMNS // 32)).astype(np.float16)
    blocks[..., :2] = scales[..., None].view(np.uint8)
    return HostArray(blocks.reshape(rows, -1), "q4_0", (rows, COLUMNS))


def loading(backend, sources):
    """Packs some matrices in a fixed order, as a loader does."""

    def load():
        return (
            *pack_rows(sources["qkv"], "bfloat16", backend.emitter),
            *pack_pairs(*sources["gate"], "bfloat16", backend.emitter),
            *pack_rows(sources["plain"], "bfloat16", backend.emitter),
        )

    return load


def start(backend, model, sources):
    opened = {model: FileIdentity.of(model.stat())}
    cache = PackedWeightCache(backend.emitter)
    loaded = cache.load(opened, "bfloat16", loading(backend, sources))
    cache.finish()
    return loaded


def packed(folder):
    """The cache files."""
    return sorted(folder.glob("*.tiles"))


def product(backend, matrix, x):
    out = backend.emitter.new((len(x), matrix.rows))
    Products(backend.emitter, Flag.X_EXACT).product(x, matrix, out)
    return out


def check(backend, found, sources, rng):
    """Compare products with loaded matrices and with the sources."""
    x = rng.standard_normal((3, COLUMNS)).astype(np.float32)
    rows = np.concatenate([dequantize(each) for each in sources["qkv"]])
    product_of = product(backend, found[0], x)
    np.testing.assert_allclose(product_of, x @ rows.T, rtol=2e-2, atol=2e-1)


def changed_contents(model):
    data = bytearray(model.read_bytes())
    data[12345] ^= 1
    return data

"""Time of block-sparse products and attention, relative to dense ones.

    python bench/block_sparse.py [numpy|torch|jax] [density]

Prints the ratio of the shortest of nine calls each, taken in turn. On a GPU also of a
larger matrix, for the smaller one is multiplied in less time than it takes to launch.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module

import numpy as np

from inl.kernels import block_sparse_matmul, flash_attention

SIZE, BLOCKS, ROWS = 128, 16, 512
LARGE = 64, 4096
"""BLOCKS and ROWS of the larger matrix."""
LENGTH, HEADS, DIM = 2048, 8, 64
TURNS = 9


def maker(framework):
    """Convert NumPy arrays; torch tensors are put on a GPU if there is one."""
    if framework == "numpy":
        return np.asarray
    if framework == "jax":
        return import_module("jax.numpy").asarray
    torch = import_module("torch")
    place = "cuda" if torch.cuda.is_available() else "cpu"
    return lambda x: torch.from_numpy(np.array(x)).to(place)


def wait(x):
    if hasattr(x, "block_until_ready"):
        x.block_until_ready()
    elif getattr(getattr(x, "device", None), "type", "") == "cuda":
        import_module("torch").cuda.synchronize()


def shortest(calls):
    times = [[] for _ in calls]
    for turn in range(TURNS + 1):
        for call, held in zip(calls, times, strict=True):
            start = time.perf_counter()
            wait(call())
            if turn:
                held.append(time.perf_counter() - start)
    return [min(held) for held in times]


def product(framework, share, new, rng, blocks, rows):
    """Print the relative time of a product."""
    chosen = np.sort(rng.choice(blocks**2, round(share * blocks**2), replace=False))
    indices = np.stack([chosen // blocks, chosen % blocks], 1)
    width = SIZE * blocks
    x, dense, values = new(rows, width), new(width, width), new(len(chosen), SIZE, SIZE)
    sparse_time, dense_time = shortest([
        lambda: block_sparse_matmul(x, values, indices, columns=width),
        lambda: x @ dense,
    ])  # fmt: skip
    print(f"{framework}: product of {rows} x {width} and {width} x {width} at density "
          f"{share}: {sparse_time / dense_time:.2f}")  # fmt: skip


def main(framework="numpy", density="0.25"):
    share, make, rng = float(density), maker(framework), np.random.default_rng(0)
    new = lambda *shape: make(rng.standard_normal(shape).astype(np.float32))  # noqa: E731
    product(framework, share, new, rng, BLOCKS, ROWS)
    if getattr(getattr(new(1), "device", None), "type", "") == "cuda":
        product(framework, share, new, rng, *LARGE)
    q, tiles = new(HEADS, LENGTH, DIM), LENGTH // SIZE
    mask = np.zeros(tiles * tiles, bool)
    mask[rng.choice(mask.size, round(share * mask.size), replace=False)] = True
    blocks = mask.reshape(tiles, tiles)
    sparse_time, dense_time = shortest([
        lambda: flash_attention(q, q, q, block_mask=blocks, block_size=SIZE),
        lambda: flash_attention(q, q, q, block_size=SIZE),
    ])  # fmt: skip
    print(f"{framework}: attention at density {share}: {sparse_time / dense_time:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])

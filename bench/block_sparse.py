"""Time of block-sparse products and attention, relative to dense ones.

    python bench/block_sparse.py [numpy|torch|jax] [density]

Prints the ratio of the shortest of nine calls each, taken in turn. On a GPU also of a
larger matrix, of other dtypes, and of gradients; there the first ratio is of the GPU's
time, of ten calls that are replayed as a CUDA graph, and the second that of single
calls with their launches.
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
REPLAYED = 10
"""Calls of a graph."""


def maker(framework):
    """Convert NumPy arrays; torch tensors are put on a GPU if there is one."""
    if framework == "numpy":
        return np.asarray
    if framework == "jax":
        return import_module("jax.numpy").asarray
    torch = import_module("torch")
    place = "cuda" if torch.cuda.is_available() else "cpu"
    return lambda x: torch.from_numpy(np.array(x)).to(place)


def is_on_gpu(x):
    return getattr(getattr(x, "device", None), "type", "") == "cuda"


def wait(x):
    if hasattr(x, "block_until_ready"):
        x.block_until_ready()
    elif is_on_gpu(x):
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


def replayed(call):
    """Return a function that replays calls as a graph, without their launches."""
    torch = import_module("torch")
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPLAYED):
            call()

    def replay():
        graph.replay()
        torch.cuda.synchronize()

    return replay


def compare(name, sparse, dense):
    """Print the relative time of two functions."""
    if not is_on_gpu(sparse()):
        found = shortest([sparse, dense])
        print(f"{name}: {found[0] / found[1]:.2f}")
        return
    graphs = shortest([replayed(sparse), replayed(dense)])
    single = shortest([sparse, dense])
    each = [1e6 * t / REPLAYED for t in graphs]
    print(
        f"{name}: {graphs[0] / graphs[1]:.2f} ({each[0]:.0f} and {each[1]:.0f} us), "
        f"with launches {single[0] / single[1]:.2f}",
        flush=True,
    )


def places(share, rng, blocks):
    chosen = np.sort(rng.choice(blocks**2, round(share * blocks**2), replace=False))
    return np.stack([chosen // blocks, chosen % blocks], 1)


def product(framework, share, new, rng, blocks, rows):
    """Print the relative time of a product."""
    indices, width = places(share, rng, blocks), SIZE * blocks
    x, dense, values = (
        new(rows, width),
        new(width, width),
        new(len(indices), SIZE, SIZE),
    )
    name = f"product of {rows} x {width} and {width} x {width} at density {share}"

    def pair(x, values, dense, name):
        compare(
            f"{framework}: {name}",
            lambda: block_sparse_matmul(x, values, indices, columns=width),
            lambda: x @ dense,
        )

    pair(x, values, dense, name)
    if is_on_gpu(x):
        for dtype in ("float32", "bfloat16", "float16"):
            kind = getattr(import_module("torch"), dtype)
            held = [each.to(kind) for each in (x, values, dense)]
            if dtype != "float32":
                pair(*held, f"{name}, {dtype}")
            gradients(*held, indices, f"{framework}: gradients of {name}, {dtype}")


def gradients(x, values, dense, indices, name):
    """Print the relative time of both gradients of a product, without the product."""
    torch = import_module("torch")
    from inl.spec.block_structure import structure_of
    from inl_torch.triton.sparse import products

    width = dense.shape[1]
    structure = structure_of(indices, tuple(values.shape), x.shape[1], width)
    g = torch.randn(x.shape[0], width, device=x.device).to(x.dtype)

    def sparse():
        products.multiply(g, values, structure, True)
        return products.sample(x, g, structure)

    def plain():
        g @ dense.T
        return x.T @ g

    compare(name, sparse, plain)


def main(framework="numpy", density="0.25"):
    share, make, rng = float(density), maker(framework), np.random.default_rng(0)
    new = lambda *shape: make(rng.standard_normal(shape).astype(np.float32))  # noqa: E731
    product(framework, share, new, rng, BLOCKS, ROWS)
    if is_on_gpu(new(1)):
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

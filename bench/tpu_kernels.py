"""Shapes of the Pallas kernels to compile, with the work that they do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inl.dtypes import SIZES
from inl.ops.linear import Linear
from inl.ops.moe import ExpertLinear
from inl.ops.norm import Norm
from inl.spec.cache import kv_token_bytes
from inl.spec.step import Step
from inl_jax.pages import Pages, scale_lanes
from inl_jax.pallas import (
    attention_scores,
    attention_tile,
    block_sizes,
    block_sparse,
    block_sparse_attention,
    dense,
    experts,
    gated,
    matmul,
    packed,
    paged_attention,
    rope,
    rows,
    write_kv,
)

PAGE = 32


class Launch(NamedTuple):
    """One kernel at one shape."""

    kernel: str
    """Name in the compiler's output."""
    run: Callable[..., Any]
    shapes: Any
    """Arguments as a tree of (shape, dtype)."""
    nbytes: int = 0
    """Bytes that must move between HBM and the chip."""
    flops: int = 0
    runs: tuple[int, ...] = (1, 1)
    """Runs of the instructions by depth of loops: 1, then those of the grid."""
    loops: tuple[int, ...] = ()
    """Runs of each loop in order, where loops of a depth have different ones."""


def product(
    tokens: int, inputs: int, outputs: int, kind: str, *, offsets: bool = False
) -> Launch:
    """Linear layer with packed weights; kind: dtype of the codes."""
    size = packed.padded_inputs(inputs)
    bits = 8
    codes = ((size, outputs), kind)
    if kind == "int4":
        bits, codes = 4, ((size // 2, outputs), np.dtype(packed.CODES4).name)
    shape = matmul.shape_of(tokens, size, outputs, codes[1], offsets)
    most = block_sizes.searched(matmul.NAME, shape)
    blocks = matmul.blocks_of(tokens, size, outputs, most)
    scale = ((size // packed.GROUP, outputs), "int16") if "int" in kind else None
    w = packed.Packed(codes, scale, scale if offsets else None)
    halves = (scale is not None) + offsets
    stored = size * outputs * bits // 8 + halves * size * outputs // 16
    wide = pl.cdiv(outputs, blocks.outputs)
    grid = wide * pl.cdiv(tokens, blocks.rows) * blocks.parts
    dequantized = wide * blocks.parts
    chunks = blocks.inputs // matmul.CHUNK
    loop = (dequantized * chunks,) if chunks > 1 else ()
    return Launch(
        "packed_matmul",
        matmul.matmul,
        (((tokens, inputs), "bfloat16"), w),
        stored + 2 * tokens * (inputs + outputs),
        2 * tokens * inputs * outputs,
        (1, grid, *loop),
    )


def attended(
    heads: int, kv_heads: int, dim: int, tokens: int, count: int, context: int,
    dtype: str = "bfloat16", window: int | None = None, kv_dtype: str = "",
) -> Launch:  # fmt: skip
    """Attention of ``tokens`` of ``count`` rows, which end at position ``context``."""
    table = pl.cdiv(context, PAGE)
    sizes = {"tokens": tokens, "positions": tokens, "rows": tokens, "starts": count + 1}
    found = {name: ((sizes.get(name, count),), "int32") for name in Step._fields}
    found |= {
        "blocks": ((1, count, table), "int32"),
        "writes": ((1, tokens), "int32"),
        "used_counts": ((3,), "int32"),
        "plan": (),
    }

    def run(q: Any, pages: Any, step: Any) -> Any:
        return paged_attention.attention(
            q, pages, step, scale=0.1, window=window, cap=None, group=0
        )

    each = tokens // count
    size = min(paged_attention.TILE, each)
    share = heads // kv_heads
    kv_dtype = kv_dtype or dtype
    shape = paged_attention.shape_of(size * share, heads, kv_heads, dim, kv_dtype)
    most = block_sizes.searched(paged_attention.NAME, shape)
    keys = paged_attention.chunk_pages(size * share, PAGE, table, most) * PAGE
    few_too = size > attention_scores.FEW_TOKENS
    together = attention_tile.heads_together(kv_heads)
    unrolled = size * share <= attention_scores.FEW_ROWS
    wide = paged_attention.parts_of(size, share)
    parts = 0 if unrolled else kv_heads // together * wide
    starts = [context - each + i for i in range(0, each, size)]
    inner = [max(i + size - (window or context) + keys - 1, 0) // keys for i in starts]
    outer = [max((i + 1) // keys, low) for i, low in zip(starts, inner, strict=True)]
    stop = [(min(i + size, context) - 1) // keys + 1 for i in starts]
    first = [max(i + 1 - (window or context), 0) // keys for i in starts]
    bounds = [first, *([inner] if window else []), outer, stop]

    def inner_loops(times: int) -> list[int]:
        return [*([0] if few_too else []), times * parts] if parts else []

    tiles = count * len(starts)
    loops = [tiles, *inner_loops(tiles)]
    for low, high in itertools.pairwise(bounds):
        chunks = count * sum(b - a for a, b in zip(low, high, strict=True))
        loops += [chunks, *inner_loops(chunks)]
    loops += inner_loops(tiles)
    pages = cache_of(kv_heads, dim, kv_dtype)
    pairs = sum(min(context - each + i + 1, window or context) for i in range(each))
    read = count * min(context, (window or context) + each)
    itemsize = SIZES[dtype]
    return Launch(
        "ragged_paged_attention",
        run,
        (((tokens, heads, dim), dtype), pages, Step(**found)),
        read * kv_token_bytes(kv_heads, dim, kv_dtype)
        + 2 * itemsize * tokens * heads * dim,
        4 * count * pairs * heads * dim,
        loops=tuple(loops),
    )


def cache_of(kv_heads: int, dim: int, dtype: str) -> Pages:
    """Shapes of a cache; the number of blocks is that of no other array."""
    blocks = 1021
    scales = ((blocks, kv_heads, scale_lanes(PAGE)), "float32")
    cells = ((blocks, kv_heads, PAGE, 2 * dim), dtype)
    return Pages(cells, scales if dtype == "int8" else None)


def written(tokens: int, count: int, kv_heads: int, dim: int, dtype: str) -> Launch:
    """Write of ``tokens`` of ``count`` rows to the cache."""
    tile = write_kv.TILE_BYTES // SIZES[dtype]
    runs = max(pl.cdiv(tokens, tile), count)
    new = ((tokens, kv_heads, dim), "bfloat16")
    cache = cache_of(kv_heads, dim, dtype)
    moved = tile * kv_token_bytes(kv_heads, dim, dtype)
    return Launch(
        "write_kv",
        write_kv.write_kv,
        (new, new, cache, ((tokens,), "int32")),
        2 * runs * moved + 4 * tokens * kv_heads * dim,
        0,
        (1, runs),
    )


def routed(tokens: int, k: int, count: int, inputs: int, outputs: int) -> Launch:
    """Product of experts, of which different rows choose different ones."""
    read = min(count, tokens * k)
    size = 128 if tokens * k > 16 * count else 16
    block = experts.block_outputs(inputs, outputs, "bfloat16")
    tiles = tokens * k // size + read
    return Launch(
        "expert_linear",
        experts.expert_linear,
        (
            ((tokens, 1, inputs), "bfloat16"),
            ((tokens, k), "int32"),
            ExpertLinear(((count, outputs, inputs), "bfloat16")),
        ),
        2 * read * inputs * outputs,
        2 * tokens * k * inputs * outputs,
        (1, pl.cdiv(outputs, block) * tiles),
    )


def normalized(tokens: int, width: int) -> Launch:
    """Sum and norm."""
    wide = ((tokens, width), "bfloat16")

    def run(residual: Any, delta: Any, weight: Any) -> Any:
        return rows.reduce_add_norm(residual, delta, Norm(weight), eps=1e-5)

    block = rows.BLOCK_BYTES // (4 * 5 * width) // 16 * 16
    grid = pl.cdiv(tokens, min(block, tokens))
    shapes = (wide, wide, ((width,), "bfloat16"))
    return Launch(
        "reduce_add_norm",
        run,
        shapes,
        8 * tokens * width,
        0,
        (1, grid, pl.cdiv(tokens, 16)),
    )


def moved(tokens: int, width: int, *, backward: bool = False) -> Launch:
    """Two steps of INL dynamics, or their gradients."""
    wide, third = ((tokens, width), "bfloat16"), ((tokens, 3 * width), "bfloat16")

    def run(*args: Any) -> Any:
        return rows.inl_dynamics_n_steps(*args, n_steps=2, dt=0.1)

    def gradients(x: Any, v: Any, mu: Any, controller: Any) -> Any:
        def loss(args: Any) -> Any:
            return jnp.sum(run(*args)[0].astype(jnp.float32))

        return jax.grad(loss)((x, v, mu, controller))

    # JAX adds the names of the transformations.
    name = "transpose_jvp_inl_dynamics_backward__" if backward else "inl_dynamics"
    widths = 14 if backward else 8
    block = rows.BLOCK_BYTES // (4 * widths * width) // 16 * 16
    grid = pl.cdiv(tokens, min(block, tokens))
    return Launch(
        name,
        gradients if backward else run,
        (wide, wide, wide, third),
        2 * widths * tokens * width,
        0,
        (1, grid, pl.cdiv(tokens, 16)),
    )


def sparse(tokens: int, size: int, side: int) -> Launch:
    """Block-sparse product with blocks of 512, of which a quarter is stored."""
    pairs = [(i, j) for i in range(side) for j in range(side) if (i + j) % 4 == 0]

    def run(dense: Any, values: Any) -> Any:
        return block_sparse.block_sparse_matmul(
            dense, values, pairs, columns=side * size
        )

    flops = 2 * tokens * len(pairs) * size * size
    shapes = (
        ((tokens, side * size), "bfloat16"),
        ((len(pairs), size, size), "bfloat16"),
    )
    grid = pl.cdiv(tokens, block_sparse.MOST_ROWS) * len(pairs)
    nbytes = 2 * (len(pairs) * size * size + 2 * tokens * side * size)
    return Launch("block_sparse_matmul", run, shapes, nbytes, flops, (1, grid))


def plain(tokens: int, inputs: int, outputs: int) -> Launch:
    """Linear layer of many rows with plain weights."""
    shape = dense.shape_of(inputs, outputs, "bfloat16")
    most = block_sizes.searched(dense.NAME, shape)
    blocks = dense.blocks_of(tokens, inputs, outputs, most)
    grid = pl.cdiv(outputs, blocks.outputs) * pl.cdiv(tokens, blocks.rows)
    weight = ((outputs, inputs), "bfloat16")
    return Launch(
        dense.NAME,
        lambda x, weight: dense.linear(x, Linear(weight)),
        (((tokens, inputs), "bfloat16"), weight),
        2 * (tokens * inputs + outputs * inputs + tokens * outputs),
        2 * tokens * inputs * outputs,
        (1, grid * (inputs // blocks.inputs)),
    )


def doubled(tokens: int, inputs: int, outputs: int) -> Launch:
    """Gate and up projections of many rows with plain weights, and their activation."""
    blocks = gated.blocks_of(tokens, inputs, outputs)
    tall = pl.cdiv(tokens, blocks.rows)
    weight = ((outputs, inputs), "bfloat16")
    return Launch(
        gated.NAME,
        partial(gated.gated, activation="silu"),
        (((tokens, inputs), "bfloat16"), weight, weight),
        2 * (tokens * inputs + 2 * tall * outputs * inputs + tokens * outputs),
        4 * tokens * inputs * outputs,
        (1, pl.cdiv(outputs, blocks.outputs) * tall),
    )


def rotated(tokens: int, heads: int, dim: int, name: str) -> Launch:
    """Rotation of queries, or of keys."""

    def run(x: Any, cos: Any, sin: Any) -> Any:
        return rope.rotated(x, (cos, sin), interpret=False, name=name)

    wide = ((tokens, heads, dim), "bfloat16")
    table = ((tokens, dim), "float32")
    nbytes = 4 * tokens * heads * dim + 8 * tokens * dim
    blocks = pl.cdiv(tokens, rope.TOKENS)
    return Launch(
        name, run, (wide, table, table), nbytes, runs=(1, blocks, blocks * heads)
    )


def masked(heads: int, dim: int, length: int) -> Launch:
    """Block-sparse causal attention: the first block of keys and the last eight."""
    block, wide = block_sparse_attention.BLOCK, ((heads, length, dim), "bfloat16")
    rows, columns = np.indices([length // block] * 2)
    mask = (columns <= rows) & ((columns == 0) | (columns > rows - 8))
    visits = int(mask.sum())
    run = partial(
        block_sparse_attention.block_sparse_attention, block_mask=mask, causal=True
    )
    return Launch(
        "block_sparse_attention",
        run,
        (wide, wide, wide),
        4 * heads * dim * block * (visits + len(mask)),
        4 * heads * visits * block * block * dim,
        (1, heads * visits),
    )


CALLS: dict[str, Callable[[], Launch]] = {
    "135M decode qkv int8": partial(product, 32, 576, 576, "int8"),
    "135M decode up int8": partial(product, 32, 576, 1536, "int8"),
    "135M decode down int8": partial(product, 32, 1536, 576, "int8"),
    "135M decode attention": partial(attended, 9, 3, 64, 32, 32, 2048),
    "135M prefill up int8": partial(product, 2048, 576, 1536, "int8"),
    "135M prefill attention": partial(attended, 9, 3, 64, 2048, 1, 2048),
    "8B decode up int8": partial(product, 32, 4096, 14336, "int8"),
    "8B decode up int4": partial(product, 32, 4096, 14336, "int4"),
    "8B decode up int4 offsets": partial(
        product, 32, 4096, 14336, "int4", offsets=True
    ),
    "8B decode up float8": partial(product, 32, 4096, 14336, "float8_e4m3b11fnuz"),
    "8B decode down int8": partial(product, 32, 14336, 4096, "int8"),
    "8B decode attention": partial(attended, 32, 8, 128, 64, 64, 4096),
    "8B decode attention int8": partial(
        attended, 32, 8, 128, 64, 64, 4096, kv_dtype="int8"
    ),
    "8B decode write": partial(written, 64, 64, 8, 128, "bfloat16"),
    "8B decode write int8": partial(written, 64, 64, 8, 128, "int8"),
    "8B prefill write": partial(written, 2048, 1, 8, 128, "bfloat16"),
    "8B prefill up int8": partial(product, 2048, 4096, 14336, "int8"),
    "8B prefill up int4": partial(product, 2048, 4096, 14336, "int4"),
    "8B prefill down int8": partial(product, 2048, 14336, 4096, "int8"),
    "8B prefill gate and up": partial(doubled, 2048, 4096, 14336),
    "8B prefill down": partial(plain, 2048, 14336, 4096),
    "8B prefill rope queries": partial(rotated, 2048, 32, 128, "rope_q"),
    "8B prefill rope keys": partial(rotated, 2048, 8, 128, "rope_k"),
    "8B prefill attention": partial(attended, 32, 8, 128, 2048, 1, 2048),
    "8B prefill attention int8": partial(
        attended, 32, 8, 128, 2048, 1, 2048, kv_dtype="int8"
    ),
    "float32 mixed attention": partial(attended, 9, 3, 64, 64, 8, 2048, "float32", 100),
    "8x7B decode experts": partial(routed, 4, 2, 8, 4096, 14336),
    "8B decode norm": partial(normalized, 32, 4096),
    "8B prefill norm": partial(normalized, 2048, 4096),
    "INL dynamics": partial(moved, 2048, 1024),
    "INL dynamics backward": partial(moved, 2048, 1024, backward=True),
    "block-sparse": partial(sparse, 2048, 512, 8),
    "block-sparse attention": partial(masked, 32, 128, 4096),
}
"""Name -> function of no arguments that makes the launch, see :func:`launches`."""


def launches(topology: str, only: str = "") -> dict[str, Launch]:
    """Return the launches whose names contain ``only``, with a chip's block sizes."""
    chip = topology.partition(":")[0].removeprefix("tpu")
    with patch.object(block_sizes, "chip", lambda: chip):
        return {name: make() for name, make in CALLS.items() if only in name}


def planted(which: str) -> Launch:
    """Return a kernel that the compiler refuses, or that spills; see the tests."""
    if which == "vmem":
        return filled("planted_vmem", (1 << 13, 1 << 12), lambda x: x[:8] + 1)
    if which == "mosaic":
        return filled("planted_mosaic", (8, 128), lambda x: jnp.sort(x[...], axis=0))
    return filled("planted_spills", (1024, 128), held)


def held(x: Any) -> Any:
    """Keep more values alive than there are registers."""
    parts = [x[8 * i : 8 * i + 8] for i in range(128)]
    for step in range(4):
        parts = [parts[i] * parts[(37 * i + step) % 128] for i in range(128)]
    return jnp.concatenate(parts)


def filled(name: str, shape: tuple[int, int], function: Callable[[Any], Any]) -> Launch:
    """Return a kernel of one block, which writes its first rows."""

    def body(x: Any, out: Any) -> None:
        rows = function(x)
        out[: len(rows)] = rows

    def run(x: Any) -> Any:
        return pl.pallas_call(
            body, out_shape=jax.ShapeDtypeStruct(shape, x.dtype), name=name,
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=48 << 20),
        )(x)  # fmt: skip

    return Launch(name, run, ((shape, "float32"),))

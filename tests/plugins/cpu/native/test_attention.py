"""Attention over each cache format, alone and with fused rotation, norms and writes."""

from __future__ import annotations

import numpy as np
import pytest
from native_harness import (
    Flag,
    Native,
    Op,
    aligned,
    bf16,
    excess,
    f32,
    i32,
    instruction,
)

from inl.dtypes import rounded, rounded_e4m3
from inl.ops import catalog
from inl.ops.attention import attention_case, random_step
from inl.spec.cache import Cache
from inl.spec.op import Case
from inl.spec.tolerance import judge
from inl.testing.float8_cases import with_float8

CATALOG = catalog()
CASES = [
    *CATALOG["attention"].cases(np.random.default_rng(3)),
    attention_case(np.random.default_rng(4), "mixed", (8, 2, 20), {}),
    attention_case(np.random.default_rng(4), "mixed", (14, 2, 256), {"window": 5}),
    attention_case(np.random.default_rng(4), "mixed", (5, 1, 80), {"cap": 50.0}),
]


KINDS = {
    "float32": 0, "bfloat16": Flag.KV_BF16, "int8": Flag.KV_INT8,
    "float8": Flag.KV_FLOAT8,
}  # fmt: skip
"""Flags by what a cache holds."""


class Paged:
    """A cache in the native layout."""

    def __init__(self, native, shape, dtype, scales=None):
        self.native, self.shape, self.scales = native, shape, scales
        self.flags = KINDS[dtype]
        size = native.lib.inl_cache_bytes(*shape, self.flags)
        assert size > 0
        # Unwritten memory may contain anything: here, NaN.
        self.k, self.v = aligned(size), aligned(size)
        self.k[:], self.v[:] = 255, 255

    def fill(self, cache):
        blocks, size, *_ = self.shape
        self.write(f32(cache.k), f32(cache.v), i32(np.arange(blocks * size)))

    def write(self, k, v, writes):
        _, size, heads, width = self.shape
        dims = len(writes), heads, width, size, heads * width
        data = k, v, self.k, self.v, writes, self.scales
        self.native.run(instruction(Op.WRITE_KV, dims, data, flags=self.flags))

    def read(self):
        plain = np.empty((2, *self.shape), np.float32)
        data = self.k, self.v, *plain, self.scales
        self.native.run(instruction(Op.READ_CACHE, self.shape, data, flags=self.flags))
        return Cache(*plain)


def attend(native, q, paged, step, attrs, *, k=None, v=None, flags=0, **extra):
    tokens, heads, width = q.shape
    _, size, kv_heads, _ = paged.shape
    y = np.full_like(q, np.nan)
    group = attrs.get("group", 0)
    dims = (
        tokens, heads, kv_heads, width, size, len(step.lengths), step.blocks.shape[-1],
        attrs.get("window") or 0, heads * width, kv_heads * width,
    )  # fmt: skip
    parts = ("cos", "sin", "q_norm", "k_norm", "sinks")
    data = (
        q, k, v, paged.k, paged.v, y, step.positions, step.rows, step.starts,
        step.lengths, i32(step.blocks[group]), i32(step.writes[group]),
        *[extra.get(part) for part in parts], paged.scales,
    )  # fmt: skip
    reals = attrs["scale"], attrs.get("cap") or 0.0, extra.get("eps", 0.0)
    native.run(instruction(Op.ATTENTION, dims, data, reals, paged.flags | flags))
    return y


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention(native, case, dtype):
    narrow = bf16 if dtype == "bfloat16" else f32
    q, cache, step = case.args
    paged = Paged(native, cache.k.shape, dtype)
    paged.fill(cache)
    y = attend(native, narrow(q), paged, step, case.attrs)
    verdict = judge(CATALOG["attention"], case, dtype, y)
    assert verdict.passed, verdict


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("scales", [None, (0.5, 2.0)])
def test_attention_over_float8(native, case, scales):
    """As exact as over float32: only what is cached is rounded."""
    case = with_float8(case, scales or (1.0, 1.0))
    q, cache, step = case.args
    paged = Paged(native, cache.k.shape, "float8", scales and f32(scales))
    k_scale, v_scale = cache.scales
    paged.fill(Cache(cache.k * k_scale, cache.v * v_scale))
    y = attend(native, f32(q), paged, step, case.attrs)
    verdict = judge(CATALOG["attention"], case, "float32", y)
    assert verdict.passed, verdict


def test_every_float8_survives_and_others_are_rounded(native):
    """All codes, halves between them, and their neighbors, against the NumPy body."""
    grid = np.unique(rounded_e4m3(np.linspace(-460, 460, 1 << 16)))
    grid = np.unique(np.concatenate([grid, np.arange(-15, 16) * 2.0**-9]))
    halves = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate(
        [
            grid,
            halves,
            np.nextafter(f32(halves), f32(9e9)),
            np.nextafter(f32(halves), f32(-9e9)),
            [1e9, -1e9, np.inf],
        ]
    )
    x = f32(np.pad(x, (0, -len(x) % 64))).reshape(1, -1, 2, 32)
    for scales in ((1.0, 1.0), (0.37, 1.9)):
        factors = f32(scales)
        paged = Paged(native, x.shape, "float8", factors)
        plain = Cache(x * factors[0], x * factors[1])
        paged.fill(plain)
        for got, given, scale in zip(paged.read(), plain, factors, strict=False):
            want = rounded_e4m3(given.astype(np.float32) / scale) * scale
            assert np.array_equal(got, want)


def test_nan_in_float8_stays_nan(native, rng):
    case = with_float8(CASES[0], (1.0, 1.0))
    q, cache, step = case.args
    k = cache.k.copy()
    k[step.blocks[0, 0, 0], 0, :, 3] = np.nan  # the first key of the first row
    paged = Paged(native, cache.k.shape, "float8")
    paged.fill(Cache(k, cache.v))
    y = attend(native, f32(q), paged, step, case.attrs)
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1:]).all()


@pytest.mark.parametrize("block_size", [1, 4, 16, 24, 32])
@pytest.mark.parametrize("narrow", [False, True])
def test_cache_conversion(native, rng, block_size, narrow):
    shape = 5, block_size, 2, 20
    plain = Cache(*f32(rng.standard_normal((2, *shape))))
    if narrow:
        plain = Cache(bf16(plain.k), bf16(plain.v))
    paged = Paged(native, shape, "bfloat16" if narrow else "float32")
    paged.fill(plain)
    found = paged.read()
    assert np.array_equal(found.k, plain.k)
    assert np.array_equal(found.v, plain.v)


WRITES = list(CATALOG["write_kv"].cases(np.random.default_rng(2)))


@pytest.mark.parametrize("case", WRITES, ids=lambda case: case.name)
def test_write_kv(native, case):
    k, v, cache, writes = case.args
    paged = Paged(native, cache.k.shape, "float32")
    paged.fill(cache)
    paged.write(f32(k), f32(v), i32(writes))
    assert judge(CATALOG["write_kv"], case, "float32", paged.read()).passed


def long_case(rng, *, counts, cached, block_size=16, heads=6, kv_heads=2, width=64):
    step, blocks = random_step(rng, cached, counts, block_size=block_size)
    tokens = sum(counts)
    q = rng.standard_normal((tokens, heads, width))
    k, v = rng.standard_normal((2, tokens, kv_heads, width))
    cache = Cache(*rng.standard_normal((2, blocks, block_size, kv_heads, width)))
    return Case("", (q, k, v, cache, step), {"scale": width**-0.5})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("cached", "counts"),
    [([0], [70]), ([130, 33, 7], [1, 1, 1]), ([40, 0, 3], [1, 25, 90])],
)
def test_fused_rotation_and_cache_write(native, rng, dtype, cached, counts):
    case = long_case(rng, cached=cached, counts=counts)
    narrow = bf16 if dtype == "bfloat16" else f32
    q, k, v, cache, step = case.args
    angle = rng.uniform(0, 6, (len(q), 32))
    cos, sin = f32(np.cos(angle)), f32(np.sin(angle))
    paged = Paged(native, cache.k.shape, dtype)
    paged.fill(cache)
    flags = Flag.ONE_TOKEN_ROWS if max(counts) == 1 else 0
    y = attend(native, narrow(q), paged, step, case.attrs, k=narrow(k), v=narrow(v),
               cos=cos, sin=sin, flags=flags)  # fmt: skip
    turned = CATALOG["rope"].body(*(narrow(a).astype(float) for a in (q, k)), cos, sin)
    rotated = Case("", (*turned, v, cache, step), case.attrs)
    verdict = judge(CATALOG["attend"], rotated, dtype, (y, paged.read()))
    assert verdict.passed, verdict


@pytest.mark.parametrize("block_size", [4, 16, 40])
@pytest.mark.parametrize("attrs", [{}, {"window": 21}, {"cap": 5.0}])
@pytest.mark.parametrize(
    ("cached", "counts", "dims"),
    [
        ([0], [70], (6, 2, 64)),
        ([40, 0, 3], [1, 25, 61], (9, 3, 64)),
        ([17], [33], (3, 1, 128)),
        ([5], [64], (2, 2, 96)),
    ],
)
def test_many_tokens_batch_variant(
    native, rng, block_size, attrs, cached, counts, dims
):
    heads, kv_heads, width = dims
    case = long_case(rng, cached=cached, counts=counts, heads=heads, width=width,
                     kv_heads=kv_heads, block_size=block_size)  # fmt: skip
    q, k, v, cache, step = case.args
    paged = Paged(native, cache.k.shape, "bfloat16")
    paged.fill(cache)
    both = case.attrs | attrs
    y = attend(native, bf16(q), paged, step, both, k=bf16(k), v=bf16(v),
               flags=Flag.BATCH_VARIANT)  # fmt: skip
    named = Case("", case.args, both)
    verdict = judge(CATALOG["attend"], named, "bfloat16", (y, paged.read()))
    assert verdict.passed, verdict


def test_fused_head_norms(native, rng):
    case = long_case(rng, cached=[4, 9], counts=[1, 6])
    q, k, v, cache, step = case.args
    norms = f32(rng.standard_normal((2, 64)))
    paged = Paged(native, cache.k.shape, "float32")
    paged.fill(cache)
    y = attend(native, f32(q), paged, step, case.attrs, k=f32(k), v=f32(v),
               q_norm=norms[0], k_norm=norms[1], eps=1e-6)  # fmt: skip

    def normed(x, weight):
        x = f32(x).astype(np.float64)
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * weight

    heads = normed(q, norms[0]), normed(k, norms[1])
    verdict = judge(
        CATALOG["attend"],
        Case("", (*heads, v, cache, step), case.attrs),
        "float32",
        (y, paged.read()),
    )
    assert verdict.passed, verdict


def test_sinks(native, rng):
    case = long_case(rng, cached=[20], counts=[3])
    q, _, _, cache, step = case.args
    sinks = f32(rng.standard_normal(6))
    paged = Paged(native, cache.k.shape, "float32")
    paged.fill(cache)
    found = attend(native, f32(q), paged, step, case.attrs, sinks=sinks)
    plain = attend(native, f32(q), paged, step, case.attrs)
    ids = step.blocks[0, 0]
    keys = cache.k[ids].reshape(-1, 2, 64)
    for token in range(3):
        for head in range(6):
            scores = keys[: 21 + token, head // 3] @ q[token, head] / 8
            total = np.exp(scores).sum()
            share = total / (total + np.exp(float(sinks[head])))
            assert np.allclose(
                found[token, head], share * plain[token, head], rtol=1e-5
            )


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    ("length", "block_size", "window"),
    [(75, 16, None), (300, 16, None), (220, 24, None), (300, 16, 130)],
)
def test_results_of_a_token_are_independent_of_the_batch(
    lib, native, rng, dtype, length, block_size, window
):
    """Chunked, batched, and on any number of threads."""
    case = long_case(rng, cached=[0], counts=[length], block_size=block_size)
    q, k, v, _, step = case.args
    q, k, v = f32(q), f32(k), f32(v)
    shape, attrs = case.args[3].k.shape, case.attrs | {"window": window}

    def together(opened):
        paged = Paged(opened, shape, dtype)
        return attend(opened, q, paged, step, attrs, k=k, v=v)

    want = together(native)
    for threads in (1, 4):
        other = Native(lib, native.isa, threads)
        assert np.array_equal(together(other), want)
        other.close()
    paged = Paged(native, shape, dtype)
    last = length - 1
    for start, stop in (
        (0, 1),
        (1, 9),
        (9, last - 20),
        (last - 20, last),
        (last, length),
    ):
        part = step._replace(
            positions=i32(step.positions[start:stop]),
            rows=i32(step.rows[start:stop]),
            starts=i32([0, stop - start]),
            lengths=i32([stop]),
            writes=i32(step.writes[:, start:stop]),
        )
        pieces = (array[start:stop].copy() for array in (q, k, v))
        own_q, own_k, own_v = pieces
        flags = Flag.ONE_TOKEN_ROWS if stop - start == 1 else 0
        y = attend(native, own_q, paged, part, attrs, k=own_k, v=own_v, flags=flags)
        assert np.array_equal(y, want[start:stop]), (start, stop)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("window", [None, 700])
def test_long_rows_have_the_same_bits_alone_and_together(native, rng, dtype, window):
    """Chunks have several segments where there are many, else one."""
    case = long_case(rng, cached=[1100, 300] * 4, counts=[1] * 8, heads=28, kv_heads=4,
                     width=20)  # fmt: skip
    q, _, _, cache, step = case.args
    q, attrs = f32(q), case.attrs | {"window": window}
    paged = Paged(native, cache.k.shape, dtype)
    paged.fill(cache)
    together = attend(native, q, paged, step, attrs)
    for row in range(8):
        alone = step._replace(
            positions=i32(step.positions[row : row + 1]),
            rows=i32([0]),
            starts=i32([0, 1]),
            lengths=i32(step.lengths[row : row + 1]),
            blocks=step.blocks[:, row : row + 1],
            writes=i32(step.writes[:, row : row + 1]),
        )
        y = attend(native, q[row : row + 1].copy(), paged, alone, attrs)
        assert np.array_equal(y, together[row : row + 1]), row


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("attrs", [{}, {"window": 300}, {"cap": 5.0}])
@pytest.mark.parametrize(
    ("cached", "counts", "dims", "block_size"),
    [
        ([700, 3, 255, 256], [1, 1, 1, 1], (9, 3, 64), 16),
        ([300], [20], (7, 1, 64), 24),
        ([300, 260], [1, 80], (4, 4, 20), 40),
        ([1100], [1], (10, 2, 128), 4),
        ([2300, 900], [1, 1], (56, 8, 16), 16),
    ],
)
def test_contexts_of_several_segments(
    native, rng, dtype, attrs, cached, counts, dims, block_size
):
    """Compared with float64 over the stored keys and values: the rounding of the cache
    is excluded."""
    heads, kv_heads, width = dims
    case = long_case(rng, cached=cached, counts=counts, heads=heads, width=width,
                     kv_heads=kv_heads, block_size=block_size)  # fmt: skip
    q, _, _, cache, step = case.args
    paged = Paged(native, cache.k.shape, dtype)
    paged.fill(cache)
    q = bf16(q) if dtype == "bfloat16" else f32(q)
    both = {"window": None, "cap": None, "group": 0} | case.attrs | attrs
    y = attend(native, q, paged, step, both)
    body = CATALOG["attention"].body
    stored = Cache(*(part.astype(np.float64) for part in paged.read()[:2]))
    exact = body(q.astype(np.float64), stored, step, **both)
    dtype = "float32" if dtype == "float8" else dtype
    if dtype == "int8":
        # Queries and weights have 15 bits.
        assert excess(y, exact, exact, "bfloat16") < 0.25
        return
    close = rounded(f32(body(q, paged.read(), step, **both)), dtype)
    # Sums are sequential, whereas NumPy adds pairwise.
    assert excess(y, exact, close, dtype) <= (2 if dtype == "float32" else 1)


def test_an_int8_cache_has_a_scale_for_each_token_and_head(native, rng):
    shape = 3, 24, 2, 20
    plain = rng.standard_normal((2, *shape)) * np.exp(
        rng.normal(size=(2, *shape[:3], 1))
    )
    plain = f32(plain)
    plain[0, 1, 5, 1] = 0
    paged = Paged(native, shape, "int8")
    paged.fill(Cache(*plain))
    most = np.abs(plain).max(-1, keepdims=True)
    steps = np.where(most > 0, most, 1) / 127
    want = np.rint(plain / steps) * steps
    for found, exact, step in zip(paged.read()[:2], want, steps, strict=True):
        # A number halfway between two codes may round either way.
        assert (np.abs(found - exact) <= 1.001 * step).all()
        assert np.mean(np.abs(found - exact) > 1e-3 * step) < 0.01
    assert not paged.read().k[1, 5, 1].any()


def test_nan_propagates_through_an_int8_cache(native, rng):
    case = long_case(rng, cached=[20], counts=[1])
    q, _, _, cache, step = case.args
    cache.v[step.blocks[0, 0, 0], 3, 1, 7] = np.nan
    paged = Paged(native, cache.k.shape, "int8")
    paged.fill(cache)
    y = attend(native, f32(q), paged, step, case.attrs)
    assert np.isnan(y[0, 3:]).all()
    assert not np.isnan(y[0, :3]).any()

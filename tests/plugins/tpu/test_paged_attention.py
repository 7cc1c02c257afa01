"""Ragged paged attention in the TPU simulator, compared with the float64 body.

The simulator delivers each copy as late as possible, fills memory that was not written
with NaN, and reports races.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from inl.ops.attention import attention as op
from inl.ops.attention import random_step
from inl.spec.cache import Cache
from inl.spec.op import Case
from inl.spec.step import Step
from inl.spec.tolerance import judge, stored
from inl.spec.tree import tree_map
from inl_jax.pages import Pages
from inl_jax.pallas import attention_scores, block_sizes, paged_attention
from inl_jax.xla.attention import plan
from tpu_simulator import races, simulated

PAGE = 16
MIXED = {"cached": [3, 40, 0, 70], "counts": [1, 1, 20, 3]}
DECODE = {"cached": [5, 300], "counts": [1, 1]}
PROMPT = {"cached": [9, 30], "counts": [1, 83]}


FEW = [0, 1]
MORE = [pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6)]


def make_case(seed, dim, rows, **attrs):
    rng = np.random.default_rng(seed)
    step, blocks = random_step(rng, **rows, block_size=PAGE, pad_rows=1, pad_tokens=2)
    q = rng.standard_normal((step.tokens.shape[0], 6, dim))
    cache = Cache(*rng.standard_normal((2, blocks, PAGE, 2, dim)))
    values = {"scale": dim**-0.5, "window": None, "cap": None, "group": 0, **attrs}
    return Case("simulated", (q, cache, step), values)


def quantized(rng, case):
    """A case with a cache of codes times powers of two, and these codes and powers."""
    q, cache, step = case.args
    codes = rng.integers(-127, 128, (2, *cache.k.shape))
    scales = 2.0 ** rng.integers(-7, -4, (2, *cache.k.shape[:3]))
    return (
        Case(case.name, (q, Cache(*(codes * scales[..., None])), step), case.attrs),
        codes,
        scales,
    )


def run(case, dtype, seed=0, kv_dtype=None):
    """Run a case; returns its verdict. Cells that no row wrote are NaN."""
    if kv_dtype == "int8":
        case, codes, scales = quantized(np.random.default_rng(seed), case)
    q, cache, step = stored(case, dtype, "f4")
    written = np.zeros(cache.k.shape[:2], bool)
    for row, length in enumerate(step.lengths):
        for place in range(length):
            written[step.blocks[0, row, place // PAGE], place % PAGE] = True
    cells = np.concatenate([cache.k, cache.v], -1)
    cells = np.where(written[:, :, None, None], cells, np.nan).swapaxes(1, 2)
    if kv_dtype is None:
        pages = Pages(jnp.asarray(cells, dtype))
    else:
        scales = np.where(written[:, :, None], scales, np.nan)
        lanes = np.full((len(cells), 2, 128), np.nan)
        lanes[:, :, : 2 * PAGE] = np.concatenate(scales, 1).swapaxes(1, 2)
        codes = np.concatenate(codes, -1).swapaxes(1, 2)
        pages = Pages(jnp.asarray(codes, "int8"), jnp.asarray(lanes, "float32"))
    device_step = tree_map(jnp.asarray, step)
    found = paged_attention.attention(
        jnp.asarray(q, dtype),
        pages,
        device_step,
        **case.attrs,
        interpret=simulated(seed),
    )
    return judge(op, case, dtype, np.asarray(found.astype(jnp.float32)))


@pytest.mark.parametrize(
    ("dim", "dtype", "rows", "attrs"),
    [
        (64, "bfloat16", MIXED, {}),
        pytest.param(128, "float32", DECODE, {"window": 270}, marks=pytest.mark.long),
        pytest.param(128, "bfloat16", PROMPT, {}, marks=pytest.mark.full),
        pytest.param(64, "float32", PROMPT, {"window": 41}, marks=pytest.mark.long),
    ],
)
def test_an_int8_cache_equals_the_body(monkeypatch, dim, dtype, rows, attrs):
    if rows is PROMPT:
        small_blocks(monkeypatch)
    verdict = run(make_case(1, dim, rows, **attrs), dtype, kv_dtype="int8")
    assert verdict.passed, str(verdict)
    assert not races()


def small_blocks(monkeypatch, rows=256):
    """Several chunks, parts and blocks of scores in short prompts."""
    monkeypatch.setattr(paged_attention, "PROMPT_KEYS", 32)
    monkeypatch.setattr(paged_attention, "ROWS", rows)
    monkeypatch.setattr(paged_attention, "COLUMNS", 128)
    monkeypatch.setattr(paged_attention, "AHEAD", 2)
    monkeypatch.setattr(attention_scores, "AHEAD", 2)


@pytest.mark.parametrize(
    ("dim", "dtype", "rows", "attrs"),
    [
        (64, "float32", MIXED, {}),
        (64, "bfloat16", DECODE, {}),
        (128, "bfloat16", MIXED, {"window": 9}),
        (128, "float32", DECODE, {"cap": 2.0, "window": 270}),
        pytest.param(128, "bfloat16", PROMPT, {}, marks=pytest.mark.full),
        pytest.param(64, "float32", PROMPT, {"window": 41}, marks=pytest.mark.long),
        pytest.param(128, "float32", PROMPT, {"cap": 2.0}, marks=pytest.mark.full),
    ],
)
def test_equals_the_body_without_races(monkeypatch, dim, dtype, rows, attrs):
    """Chunks that all queries see whole, with and without a mask, in several parts."""
    if rows is PROMPT:
        small_blocks(monkeypatch, rows=128 if "cap" in attrs else 256)
    verdict = run(make_case(1, dim, rows, **attrs), dtype)
    assert verdict.passed, str(verdict)
    assert not races()


@pytest.mark.parametrize("rows", [DECODE, pytest.param(PROMPT, marks=pytest.mark.full)])
def test_sizes_of_the_table_do_not_change_results(monkeypatch, rows):
    sizes, asked = {"keys": 48, "columns": 128}, []

    def searched(*key):
        asked.append(key)
        return sizes

    monkeypatch.setattr(block_sizes, "searched", searched)
    verdict = run(make_case(1, 64, rows), "bfloat16")
    assert verdict.passed, str(verdict)
    assert not races()
    kind = "decode" if rows is DECODE else "prompt"
    name = f"{kind}, 6 heads, 2 of keys, 64 wide, bfloat16 cache"
    assert set(asked) == {(paged_attention.NAME, name)}


@pytest.mark.long
@pytest.mark.parametrize("seed", FEW + MORE)
def test_several_seeds(monkeypatch, seed):
    small_blocks(monkeypatch)
    rng = np.random.default_rng(seed)
    rows = {"cached": rng.integers(0, 90, 4), "counts": rng.integers(1, 90, 4)}
    window = (None, int(rng.integers(1, 120)))[seed % 2]
    verdict = run(make_case(seed, 64, rows, window=window), "float32", seed=seed)
    assert verdict.passed, str(verdict)
    assert not races()


def test_prompts_have_large_tiles():
    """Few rows make tiles of many tokens; many rows do not."""

    def size(tokens, rows):
        sizes = dict.fromkeys(("tokens", "positions", "rows"), tokens)
        sizes["starts"] = rows + 1
        spec = {
            name: jax.ShapeDtypeStruct((sizes.get(name, rows),), "int32")
            for name in Step._fields
        }
        made = partial(plan, block_size=PAGE, most=paged_attention.TILE)
        return jax.eval_shape(made, Step(**spec)).tokens.shape[1]

    assert [size(2048, 8), size(512, 64), size(64, 64)] == [256, 32, 1]


@pytest.mark.parametrize("rows", [MIXED, pytest.param(PROMPT, marks=pytest.mark.full)])
def test_a_missing_mask_is_found(monkeypatch, rows):
    """Tiles of few rows, and of many."""
    monkeypatch.setattr(attention_scores, "hidden", lambda shape, scores, *_: scores)
    assert not run(make_case(1, 64, rows), "float32").passed


def test_a_copy_that_is_not_awaited_is_found(monkeypatch):
    class Unawaited:
        def __init__(self, copy):
            self.start, self.wait = copy.start, lambda: None

    original = pltpu.make_async_copy
    monkeypatch.setattr(
        pltpu, "make_async_copy", lambda *args: Unawaited(original(*args))
    )
    verdict = run(make_case(2, 64, DECODE), "float32")
    assert races() or not verdict.passed


@pytest.mark.parametrize(
    ("heads", "dim", "page", "reason"),
    [
        (6, 80, 16, "head size 80"),
        (6, 64, 8, "block size 8"),
        (128, 576, 16, "128 heads of size 576"),
        (6, 64, 32, None),
    ],
)
def test_unsuitable_sizes_are_refused(heads, dim, page, reason):
    cache = Cache(*[jax.ShapeDtypeStruct((3, page, 2, dim), "bfloat16")] * 2)
    q = jax.ShapeDtypeStruct((2048, heads, dim), "bfloat16")
    found = paged_attention.refuse(q, cache, None)
    assert (found or "").startswith(reason or "")
    assert bool(found) == bool(reason)

"""Attention of long rows over gathered keys, against the float64 body."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from selected import selected
from triton_place import IS_SLOW, PLACE

from inl.ops import catalog
from inl.ops.attention import random_step
from inl.spec.cache import Cache
from inl.spec.op import Case
from inl.spec.tolerance import judge
from inl.testing.float8_cases import with_float8
from inl.testing.op_call import OpCall
from inl.testing.op_check import judged, require_passed, run_checked
from op_cases import Target

# isort: split
from inl_torch import triton as ours
from inl_torch.triton.attention import attention, long_rows, prompt
from inl_torch.triton.attention.plan import Work
from inl_torch.triton.tuning import Tuning

TUNING = Tuning(long_row_tokens=40)
SPEC = catalog()["attention"]
SIZE = 16
STEPS = {
    "a prompt": ([0], [150], {}),
    "a chunk": ([201], [140], {}),
    "tiles of whole keys": ([256], [128], {"pad_rows": 1}),
    "decoding rows": ([40, 9, 300], [1, 1, 130], {}),
    "several": ([3, 0, 129, 20, 64], [1, 40, 128, 10, 60], {"pad_tokens": 30}),
    "none": ([3, 5], [1, 39], {"pad_tokens": 60}),
    "padding": ([70, 5, 90], [1, 39, 77], {"pad_rows": 3, "pad_tokens": 140}),
}
DIMS = ((9, 3, 64), (4, 1, 128), (2, 2, 128))

pytestmark = pytest.mark.skipif(
    PLACE == "cuda" and torch.cuda.get_device_capability() != (9, 0),
    reason="the chip has no copy engine",
)


def case_of(rng, name, dims, window=None, cap=None):
    cached, counts, extra = STEPS[name]
    step, blocks = random_step(rng, cached, counts, block_size=SIZE, **extra)
    heads, kv_heads, dim = dims
    q = rng.standard_normal((step.tokens.shape[0], heads, dim))
    cache = Cache(*rng.standard_normal((2, blocks, SIZE, kv_heads, dim)))
    attrs = {"scale": dim**-0.5, "window": window, "cap": cap, "group": 0}
    return Case(f"{name}/{dims}/{window}", (q, cache, step), attrs)


def attended(*arguments, **attrs):
    kernel = selected(ours.kernels(TUNING), "attention", arguments, attrs)
    assert kernel.name == "triton_gathered"
    return kernel.run(*arguments, **attrs)


@pytest.fixture
def apart(monkeypatch):
    """The numbers of long rows of each call that attends to them apart."""
    rows, plain = [], attention.attend_rows_apart

    def counted(*args, **options):
        rows.append(int(args[4].is_long.sum()))
        plain(*args, **options)

    monkeypatch.setattr(attention, "attend_rows_apart", counted)
    return rows


PAIRS = [(dtype, dims) for dtype in ("bfloat16", "float16") for dims in DIMS]


@pytest.mark.parametrize(("dtype", "dims"), PAIRS[:4] if IS_SLOW else PAIRS)
def test_long_rows_beside_others(dtype, dims, seed, apart, on_torch, on_host):
    rng = np.random.default_rng(seed)
    for name, (_, counts, _) in STEPS.items():
        case = case_of(rng, name, dims)
        q, cache, step = on_torch(SPEC, case, dtype, PLACE)
        out = attended(q, cache, step, **case.attrs)
        verdict = judge(SPEC, case, dtype, on_host(out))
        assert verdict.passed, f"{case.name} {dtype}, seed {seed}: {verdict}"
        assert apart.pop() == sum(count >= 40 for count in counts)


def test_rows_that_are_rotated(seed, apart, on_torch, on_host):
    spec, rng = catalog()["rope_attend"], np.random.default_rng(seed)
    case = case_of(rng, "several", (4, 2, 128))
    q, cache, step = case.args
    k, v = rng.standard_normal((2, len(q), 2, 128))
    # Padding tokens all write to position 0, in any order: give them one value.
    k[step.used_counts[2] :] = v[step.used_counts[2] :] = 0
    angle = rng.uniform(0, 100, (len(q), 64))
    args = (q, k, v, np.cos(angle), np.sin(angle), cache, step)
    case = Case(case.name, args, case.attrs)
    arguments = on_torch(spec, case, "bfloat16", PLACE)
    kernel = selected(ours.kernels(TUNING), spec.name, arguments, case.attrs)
    assert kernel.name == "triton_gathered"
    got = on_host(kernel.run(*arguments, **case.attrs))
    verdict = judge(spec, case, "bfloat16", got)
    assert verdict.passed, f"seed {seed}: {verdict}"
    assert apart == [3]


@pytest.mark.parametrize("name", ["several", "padding"])
def test_a_cache_in_float8(name, backend, apart, seed):
    """Dense rows, too, as no library call takes such a cache."""
    kernels = [k for k in ours.kernels(TUNING) if k.name.startswith("triton")]
    target = Target(type(backend)(backend.device, PLACE), kernels)
    case = with_float8(case_of(np.random.default_rng(seed), name, (4, 2, 128)))
    call = OpCall(target, SPEC, case, "bfloat16")
    require_passed(judged(call, case, run_checked(call, seed)), call, seed)
    assert apart
    assert all(apart)


def test_what_no_row_owns_is_not_read(seed, on_torch, on_host):
    """Padding tokens, and cache positions behind the end of each row, are NaN."""
    case = case_of(np.random.default_rng(seed), "padding", (4, 1, 128))
    q, cache, step = on_torch(SPEC, case, "bfloat16", PLACE)
    used = int(step.used_counts[2])
    owned = torch.zeros(cache.k.shape[:2], dtype=torch.bool, device=PLACE)
    for row, length in enumerate(step.lengths.tolist()):
        at = torch.arange(length, device=PLACE)
        owned[step.blocks[0, row, at // SIZE].long(), at % SIZE] = True
    for spoiled in cache[:2]:
        spoiled[~owned] = float("nan")
    q[used:] = float("nan")
    out = attended(q, cache, step, **case.attrs)
    verdict = judge(SPEC, case, "bfloat16", on_host(out))
    assert verdict.passed, f"seed {seed}: {verdict}"
    assert not out[used:].any()


def test_rows_that_do_not_fit_the_buffer(monkeypatch, seed, apart, on_torch, on_host):
    case = case_of(np.random.default_rng(seed), "several", (4, 1, 128))
    q, cache, step = on_torch(SPEC, case, "bfloat16", PLACE)
    tile_bytes = 2 * prompt.KEYS * 128 * q.itemsize
    for tiles, rows in ((4, 2), (3, 1)):
        monkeypatch.setattr(long_rows, "BUFFER_BYTES", tiles * tile_bytes)
        out = attended(q, cache, step, **case.attrs)
        verdict = judge(SPEC, case, "bfloat16", on_host(out))
        assert verdict.passed, f"{tiles} tiles, seed {seed}: {verdict}"
        assert sum(apart) == rows
        apart.clear()


@pytest.mark.parametrize("name", STEPS)
def test_each_token_is_in_one_list(name, seed, on_torch):
    case = case_of(np.random.default_rng(seed), name, (4, 1, 128))
    q, cache, step = on_torch(SPEC, case, "bfloat16", PLACE)
    work, limits = Work(step), long_rows.long_row_limits(q, cache, step, TUNING)
    tokens = list(range(int(work.singles)))
    for tiles in (work.tiles(16, without=limits), work.long_rows(limits).query_tiles):
        for _, first, count in tiles.tolist():
            tokens += range(first, first + count)
    assert sorted(tokens) == list(range(q.shape[0]))


@pytest.mark.parametrize(
    ("change", "attrs"),
    [
        ({}, {"window": 7}), ({}, {"cap": 3.0}), ({"dtype": "float32"}, {}),
        ({"dims": (2, 2, 80)}, {}), ({"tuning": Tuning()}, {}),
        ({"tuning": Tuning(long_row_tokens=200)}, {}),
        ({"name": "padding", "tuning": Tuning(long_row_tokens=200)}, {}),
    ],
    ids=["window", "cap", "float32", "heads of 80", "chip", "few tokens", "context"],
)  # fmt: skip
def test_other_attention_reads_the_keys_in_blocks(change, attrs, seed, on_torch):
    values = {"name": "a prompt", "dims": (4, 1, 128), "dtype": "bfloat16"} | change
    case = case_of(np.random.default_rng(seed), values["name"], values["dims"])
    arguments = on_torch(SPEC, case, values["dtype"], PLACE)
    kernels = ours.kernels(change.get("tuning", TUNING))
    kernel = selected(kernels, "attention", arguments, case.attrs | attrs)
    assert kernel.name == "triton_split"


def test_a_wrong_row_is_found(monkeypatch, seed, on_torch, on_host):
    """Tiles of queries one token too far give an answer that is not accepted."""
    case = case_of(np.random.default_rng(seed), "decoding rows", (4, 1, 128))
    plain = attention.attend_rows_apart

    def late(q, cache, step, *rest, **options):
        later = step._replace(positions=step.positions + 1)
        plain(q, cache, later, *rest, **options)

    monkeypatch.setattr(attention, "attend_rows_apart", late)
    arguments = on_torch(SPEC, case, "bfloat16", PLACE)
    out = attended(*arguments, **case.attrs)
    assert not judge(SPEC, case, "bfloat16", on_host(out)).passed, f"seed {seed}"

"""Few new tokens after long cached prefixes, against the float64 body."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from selected import selected
from triton_place import DTYPES, IS_SLOW, PLACE

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
from inl_torch.triton.attention import tile_splits
from inl_torch.triton.attention.plan import Work
from inl_torch.triton.attention.tile_splits import split_tiles
from inl_torch.triton.tuning import Tuning

TUNING = Tuning(processors=64)
SPEC = catalog()["attention"]
SIZE = 16
STEPS = {
    "a turn": ([701], [18], {}),
    "a turn, padded": ([530], [19], {"pad_rows": 3, "pad_tokens": 45}),
    "beside others": ([40, 9, 615, 0], [1, 1, 33, 5], {"pad_tokens": 2}),
    "keys that end a tile": ([640, 3], [32, 32], {}),
}
DIMS = ((9, 3, 64), (4, 1, 128), (22, 2, 16), (2, 2, 80))
WINDOWS = ((None, None), (None, 3.0), (300, None))
"""Window and cap of the scores. In the interpreter, each step has one of them."""


@pytest.fixture(autouse=True)
def short_items(monkeypatch):
    """Split prefixes that the interpreter computes in seconds."""
    monkeypatch.setattr(tile_splits, "MIN_KEYS", 64)


@pytest.fixture
def merged(monkeypatch):
    """Splits of the items of each call whose splits are merged."""
    found, plain = [], Work.tile_items

    def kept(*args, **options):
        items = plain(*args, **options)
        found.append(int(items.entries[:, 4].max()))
        return items

    monkeypatch.setattr(Work, "tile_items", kept)
    return found


def case_of(rng, name, dims, window=None, cap=None):
    cached, counts, extra = STEPS[name]
    step, blocks = random_step(rng, cached, counts, block_size=SIZE, **extra)
    heads, kv_heads, dim = dims
    q = rng.standard_normal((step.tokens.shape[0], heads, dim))
    cache = Cache(*rng.standard_normal((2, blocks, SIZE, kv_heads, dim)))
    attrs = {"scale": dim**-0.5, "window": window, "cap": cap, "group": 0}
    return Case(f"{name}/{dims}/{window}", (q, cache, step), attrs)


def attended(*arguments, name="triton_split", **attrs):
    kernels = [k for k in ours.kernels(TUNING) if k.name == name]
    return selected(kernels, "attention", arguments, attrs).run(*arguments, **attrs)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_over_many_keys(dtype, dims, seed, merged, on_torch, on_host):
    rng = np.random.default_rng(seed)
    for at, name in enumerate(STEPS, DIMS.index(dims)):
        for window, cap in (WINDOWS[at % 3],) if IS_SLOW else WINDOWS:
            case = case_of(rng, name, dims, window, cap)
            out = attended(*on_torch(SPEC, case, dtype, PLACE), **case.attrs)
            verdict = judge(SPEC, case, dtype, on_host(out))
            assert verdict.passed, f"{case.name} {dtype}, seed {seed}: {verdict}"
            assert merged.pop() > 1


@pytest.mark.parametrize("name", ["a turn, padded", "beside others"])
def test_a_cache_in_float8(name, backend, merged, seed):
    kernels = [
        k for k in ours.kernels(TUNING)
        if k.op != "attention" or k.name == "triton_split"
    ]  # fmt: skip
    target = Target(type(backend)(backend.device, PLACE), kernels)
    case = with_float8(case_of(np.random.default_rng(seed), name, (4, 2, 128)))
    call = OpCall(target, SPEC, case, "bfloat16")
    require_passed(judged(call, case, run_checked(call, seed)), call, seed)
    assert min(merged) > 1


def test_invariant_attention_is_not_split(seed, merged, on_torch):
    """A row's bits are those that it has in a step of its own."""
    rng = np.random.default_rng(seed)
    case = case_of(rng, "beside others", (4, 2, 64))
    q, cache, step = on_torch(SPEC, case, "bfloat16", PLACE)
    out = attended(q, cache, step, name="triton_rows", **case.attrs)
    first, last = step.starts[2:4].tolist()
    alone = step._replace(
        rows=step.rows[first:last] * 0, positions=step.positions[first:last],
        starts=torch.tensor([0, last - first], dtype=torch.int32, device=PLACE),
        lengths=step.lengths[2:3], slots=step.slots[2:3], blocks=step.blocks[:, 2:3],
        tokens=step.tokens[first:last], writes=step.writes[:, first:last],
    )  # fmt: skip
    same = attended(q[first:last], cache, alone, name="triton_rows", **case.attrs)
    assert torch.equal(out[first:last], same)
    assert not merged


def test_what_no_row_owns_is_not_read(seed, merged, on_torch, on_host):
    """Padding tokens, and cache positions behind the end of each row, are NaN."""
    case = case_of(np.random.default_rng(seed), "a turn, padded", (4, 1, 128))
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
    assert merged.pop() > 1


@pytest.mark.parametrize(
    ("tokens", "name", "changes"),
    [
        (16, "triton", {}), (17, "triton_split", {}), (768, "triton_split", {}),
        (1024, "triton_gathered", {}), (1024, "triton_split", {"long_row_tokens": 0}),
        (1057, "triton", {"long_row_tokens": 0}), (448, "triton", {"processors": 50}),
        (64, "triton", {"tile_waves": 0}),
    ],
)  # fmt: skip
def test_which_steps_are_split(tokens, name, changes):
    """A model of 8 billion parameters on an H100, and on chips that lack something."""
    facts = {"shared_bytes": 232_448, "long_row_tokens": 1024, **changes}
    assert chosen(tokens, None, facts) == name


@pytest.mark.parametrize(("tokens", "name"), [(528, "triton_split"), (529, "triton")])
def test_which_steps_with_a_cache_in_float8_are_split(tokens, name):
    assert chosen(tokens, torch.ones(2), {"shared_bytes": 232_448}) == name


def chosen(tokens, scales, facts):
    """Name of the kernel of a step of two rows of 32 heads of 128 elements."""
    (step, blocks), dtype = random_step(
        np.random.default_rng(0), [9, 5], [1, tokens - 1], block_size=SIZE
    ), torch.float8_e4m3fn if scales is not None else torch.bfloat16  # fmt: skip
    step = step._replace(blocks=np.zeros((1, 2, 200), np.int32))
    q = torch.empty(tokens, 32, 128, dtype=torch.bfloat16)
    numbers = (torch.empty(blocks, SIZE, 8, 128, dtype=dtype) for _ in range(2))
    attrs = {"scale": 1.0, "window": None, "cap": None, "group": 0}
    arguments = q, Cache(*numbers, scales), step
    kernels = ours.kernels(Tuning(**facts))
    return selected(kernels, "attention", arguments, attrs).name


@pytest.mark.parametrize("spare", [1, 3, 8, 40])
@pytest.mark.parametrize("window", [None, 100])
def test_items_cover_their_tiles(window, spare, seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        count = int(rng.integers(1, 30))
        queries = rng.integers(0, 9, count)
        first = np.concatenate([[0], queries.cumsum()])[:-1]
        row = np.where(rng.random(count) < 0.2, -1, np.arange(count))
        tiles = np.stack((row, first, queries), 1).astype(np.int32)
        ends = np.exp(rng.uniform(0, 9, queries.sum() + 1)).astype(np.int32)
        items = split_tiles(
            torch.from_numpy(tiles).to(PLACE), torch.from_numpy(ends).to(PLACE), spare,
            keys=32, window=window,
        )  # fmt: skip
        entries = items.entries.cpu().numpy()
        assert len(entries) == count + spare
        used = entries[entries[:, 2] > 0]
        want = tiles[queries > 0]
        each = used[used[:, 3] == 0]
        assert each[:, :3].tolist() == want.tolist(), f"seed {seed}"
        listed = [
            [*tile[:3], split, tile[4], tile[5]]
            for tile in each.tolist() for split in range(tile[4])
        ]  # fmt: skip
        assert used.tolist() == listed, f"seed {seed}"
        parts = [e[5] + e[3] for e in listed if e[4] > 1]
        assert parts == list(range(len(parts))), f"seed {seed}"
        assert len(parts) <= items.parts
        assert (spare > 1) or not parts

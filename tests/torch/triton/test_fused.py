"""Fused ops of a decoding step against the float64 bodies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_steps import limits_of
from selected import selected
from triton_place import DTYPES, IS_SLOW, PDL, PLACE

from inl.ops import catalog
from inl.ops.attention import random_step
from inl.ops.linear import Linear, QkvLinear
from inl.ops.mlp import GatedMlp
from inl.ops.norm import Norm
from inl.ops.step import empty_tables
from inl.spec.cache import Cache
from inl.spec.message import BlockTableUpdate, Row, step_frame
from inl.spec.op import Case
from inl.spec.step import Bucket
from inl.spec.tolerance import judge

# isort: split
from inl_torch import triton as ours
from inl_torch.eager.linear import StackedQkv
from inl_torch.eager.mlp import StackedMlp
from inl_torch.triton.attention import prompt as attention_prompt
from inl_torch.triton.attention import rope_attend
from inl_torch.triton.matmul import products
from inl_torch.triton.tuning import Tile, Tuning

TUNINGS = {
    "rule": Tuning(max_rows=32, shared_bytes=160 << 10),
    "ragged": Tuning(
        tiles={
            (kind, n, k): Tile(4, 64, 2)
            for kind in ("norm", "gated", "plain")
            for kind in (kind, f"{kind} x8", f"{kind} x16", f"{kind} x64")
            for n, k in ((85, 100), (30, 100), (100, 30), (24, 576))
        },
        processors=1,
        pdl=PDL,
        max_rows=64,
        max_norm_rows=64,
        shared_bytes=1 << 18,
    ),
}
"""The second has tiles that divide no shape, and uses PDL where available."""


def kernel(op, tuning):
    return next(k for k in ours.kernels(tuning) if (k.op, k.name) == (op, "triton"))


def poison():
    """Fill memory that later tensors will reuse with NaN."""
    spoiled = [torch.full((size,), float("nan"), device=PLACE) for size in 8 * [65536]]
    del spoiled


def packed(w):
    """The group's tensors as the kernels' own layout."""
    if isinstance(w, QkvLinear):
        biased = w.q_bias is not None
        bias = torch.cat((w.q_bias, w.k_bias, w.v_bias)) if biased else None
        return StackedQkv(torch.cat((w.q, w.k, w.v)), w.k, bias)
    if isinstance(w, GatedMlp):
        return StackedMlp(torch.cat((w.gate, w.up)), w.down)
    return w


def check(op, case, dtype, on_torch, on_host, seed, tuning="rule"):
    spec = catalog()[op]
    *rest, w = on_torch(spec, case, dtype, PLACE)
    kernels = (*ours.kernels(TUNINGS[tuning]), *attention_prompt.CUDNN_KERNELS)
    chosen = selected(kernels, op, (*rest, w), case.attrs)
    poison()
    got = on_host(chosen.run(*rest, packed(w), **case.attrs))
    verdict = judge(spec, case, dtype, got)
    assert verdict.passed, f"{op}/{case.name} {dtype}, seed {seed}: {verdict}"
    return chosen.name


def sums(rng, tokens, width):
    residual, delta = rng.standard_normal((2, tokens, width))
    return residual, delta, Norm(rng.standard_normal(width))


ROWS = [("float32", 1), ("bfloat16", 1), ("float16", 1), ("float16", 3)]
ROWS += [("bfloat16", tokens) for tokens in (2, 8, 9, 17, 32)]
EVERY = [("rule", *row) for row in ROWS] + [("ragged", *row) for row in ROWS]
EVERY += [("ragged", "bfloat16", 33), ("ragged", "bfloat16", 64)]
if IS_SLOW:  # each number of padded rows, full or not
    ROWS = [("float32", 1), ("bfloat16", 1), ("float16", 3), ("bfloat16", 17)]
    EVERY = [("rule", *row) for row in [*ROWS, ("bfloat16", 8)]]
    EVERY += [("ragged", "bfloat16", rows) for rows in (1, 2, 9, 32, 33)]


@pytest.mark.parametrize(("tuning", "dtype", "tokens"), EVERY)
def test_norm_qkv(tuning, dtype, tokens, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    parts = [rng.standard_normal((size, 100)) for size in (51, 17, 17)]
    biases = [rng.standard_normal(size) for size in (51, 17, 17)]
    for w in (QkvLinear(*parts), QkvLinear(*parts, *biases)):
        case = Case(f"{tokens}", (*sums(rng, tokens, 100), w), {"eps": 1e-5})
        check("norm_qkv", case, dtype, on_torch, on_host, seed, tuning)


@pytest.mark.parametrize(("tuning", "dtype", "tokens"), EVERY)
def test_norm_mlp(tuning, dtype, tokens, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    for activation in ("silu", "gelu_tanh"):
        gate, up = rng.standard_normal((2, 30, 100)) / 10
        w = GatedMlp(gate, up, rng.standard_normal((100, 30)))
        attrs = {"eps": 1e-5, "activation": activation}
        case = Case(activation, (*sums(rng, tokens, 100), w), attrs)
        check("norm_mlp", case, dtype, on_torch, on_host, seed, tuning)


@pytest.mark.parametrize(("dtype", "tokens"), ROWS)
def test_norm_logits(dtype, tokens, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    rows = rng.permutation(max(tokens, 3))[:tokens].astype(np.int32)
    residual, delta, norm = sums(rng, max(tokens, 3), 100)
    w = Linear(rng.standard_normal((30, 100)), rng.standard_normal(30))
    case = Case(f"{tokens}", (residual, delta, rows, norm, w), {"eps": 1e-5})
    check("norm_logits", case, dtype, on_torch, on_host, seed)


@pytest.mark.parametrize("shape", [(128, 1024), (24, 576)])
@pytest.mark.parametrize("gated", ["", "silu"])
def test_the_sum_is_complete_with_few_outputs(shape, gated, seed):
    """Each program stores some columns of the sum, so enough programs are needed."""
    n, k = shape
    rng = np.random.default_rng(seed)
    residual, delta, weight = (
        torch.from_numpy(rng.standard_normal(size)).to(PLACE, torch.bfloat16)
        for size in ((3, k), (3, k), (n, k))
    )
    gain = torch.ones(k, dtype=torch.bfloat16, device=PLACE)
    tuning = TUNINGS["rule"]
    assert tuning.fuses_norm(3, k)
    poison()
    total, y = products.norm_product(
        residual, delta, None, Norm(gain), weight, None, 1e-5, tuning, gated=gated
    )
    exact = residual.double() + delta.double()
    assert total.shape == (3, k)
    assert (total.double() - exact).abs().max() < 0.04
    assert y.isfinite().all()


STEPS = {
    "one": ([], [1], {}),
    "one long": ([410], [1], {"block_size": 16}),
    "long": ([300, 0, 71], [1, 1, 1], {"block_size": 16}),
    "chunk among rows": ([9, 3, 0], [1, 5, 1], {"pad_rows": 5, "pad_tokens": 1}),
    "nobody": ([5], [1], {"pad_rows": 1, "pad_tokens": 1}),
}
DIMS = {"9/3x64": (9, 3, 64), "22/2x8": (22, 2, 8), "2/1x80": (2, 1, 80)}


def attend_cases(rng, dims, steps=None, *, turn=None):
    """Cases of each step: without and with a window, or, from ``turn``, by turns."""
    many = (steps or STEPS).items()
    for number, (label, (cached, counts, extra)) in enumerate(many, turn or 0):
        step, blocks = random_step(rng, cached or [0], counts, **extra)
        heads, kv_heads, dim = dims
        size = extra.get("block_size", 4)
        pair = ((None, None), (4, 3.0))
        for window, cap in limits_of(number, pair, both=turn is None):
            attrs = {"scale": dim**-0.5, "window": window, "cap": cap, "group": 0}
            count = step.tokens.shape[0]
            q = rng.standard_normal((count, heads, dim))
            k, v = rng.standard_normal((2, count, kv_heads, dim))
            k[step.used_counts[2] :] = v[step.used_counts[2] :] = 0
            angle = rng.uniform(0, 100, (count, dim // 2))
            cache = Cache(*rng.standard_normal((2, blocks, size, kv_heads, dim)))
            args = (q, k, v, np.cos(angle), np.sin(angle), cache, step)
            yield Case(f"{label}/{window}", args, attrs)


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rope_attend(dtype, dims, tuning, seed, on_torch, on_host):
    # Of each step and size, one dtype has a window, and the other has none.
    turn = [*DIMS].index(dims) + (dtype == "float32") if IS_SLOW else None
    for case in attend_cases(np.random.default_rng(seed), DIMS[dims], turn=turn):
        check("rope_attend", case, dtype, on_torch, on_host, seed, tuning)


MANY = {"many rows": ([7 * n % 90 for n in range(33)], [1] * 33, {"pad_rows": 2})}


PAIRS = [("float32", (2, 1, 128)), ("bfloat16", (3, 1, 64))]
if not IS_SLOW:
    PAIRS += [("float32", (3, 1, 64)), ("bfloat16", (2, 1, 128))]


@pytest.mark.parametrize("many", [1, 1000])
@pytest.mark.parametrize(("dtype", "dims"), PAIRS)
def test_rope_attend_of_many_rows(
    dtype, dims, many, monkeypatch, seed, on_torch, on_host
):
    monkeypatch.setattr(rope_attend, "MANY_PROGRAMS", many)
    for case in attend_cases(np.random.default_rng(seed), dims, MANY):
        check("rope_attend", case, dtype, on_torch, on_host, seed)


PROMPTS = {
    "prompts": ([33, 5, 0], [1, 20, 17], {"block_size": 16, "pad_tokens": 28}),
    "rows and a long one": ([70, 7, 60], [1, 1, 70], {"block_size": 16}),
    "a short one among rows": ([9, 3, 0], [1, 12, 1], {"pad_rows": 2}),
}


@pytest.mark.parametrize("dims", [(9, 3, 64), (4, 1, 128), (2, 2, 80)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_attend_of_prompts(dtype, dims, seed, on_torch, on_host):
    turn = dims[0] // 2 + (dtype == "float32") if IS_SLOW else None
    for case in attend_cases(np.random.default_rng(seed), dims, PROMPTS, turn=turn):
        check("rope_attend", case, dtype, on_torch, on_host, seed)


def test_rope_attend_of_more_prompts_than_fill_the_chip(seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    given = {name: PROMPTS[name] for name in ("prompts", "rows and a long one")}
    names = {
        check("rope_attend", case, "bfloat16", on_torch, on_host, seed, "ragged")
        for case in attend_cases(rng, (9, 3, 64), given)
    }
    assert names == {"triton_mixed"}


LONE = {
    "first chunk": ([0], [40], {"block_size": 16, "pad_tokens": 2}),
    "second chunk": ([75], [37], {"block_size": 16, "pad_tokens": 3}),
    "one token": ([70], [1], {"block_size": 16, "pad_tokens": 5}),
}


def test_prompt_attention_by_cudnn(monkeypatch, seed, on_torch, on_host):
    if PLACE == "cpu":
        monkeypatch.setattr(attention_prompt, "attend_self", plain_attention)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the library is not asked on this chip")
    monkeypatch.setattr(attention_prompt, "MIN_TOKENS", 0)
    names = [
        check("rope_attend", case, "bfloat16", on_torch, on_host, seed)
        for case in attend_cases(np.random.default_rng(seed), (8, 2, 128), LONE)
    ]
    others = ["triton_split", "triton_split", "triton_mixed"]
    # Without a window, and with one.
    assert names == [name for other in others for name in ("triton+cudnn", other)]


def plain_attention(q, k, v, scale):
    """Reference of cuDNN's attention, in plain torch."""
    share = q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    scores = q @ k.transpose(1, 2) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(0, 1)
    return out.to(torch.bfloat16), scores.logsumexp(-1)


def test_rope_attend_in_float16(seed, on_torch, on_host):
    for case in attend_cases(np.random.default_rng(seed), (6, 2, 16)):
        check("rope_attend", case, "float16", on_torch, on_host, seed)


def test_a_wrong_kernel_is_found(seed, on_torch, on_host):
    rng, spec = np.random.default_rng(seed), catalog()["rope_attend"]
    verdicts = []
    for case in attend_cases(rng, (9, 3, 64)):
        *rest, step = on_torch(spec, case, "bfloat16", PLACE)
        late = step._replace(positions=step.positions + 1)
        chosen = selected(ours.kernels(), spec.name, (*rest, late), case.attrs)
        got = chosen.run(*rest, late, **case.attrs)
        verdicts.append(judge(spec, case, "bfloat16", on_host(got)).passed)
    assert not all(verdicts), f"seed {seed}"


@pytest.mark.parametrize("sampler", ["greedy", "sample"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sample_over_many_chunks(dtype, sampler, seed, on_torch, on_host):
    spec, rng = catalog()["sample"], np.random.default_rng(seed)
    case = next(c for c in spec.cases(rng) if c.name == f"{sampler}/257")
    _, step, tables = case.args
    logits = 3 * rng.standard_normal((4, 5000))
    logits[1, [7, 4000]] = 40.0  # a tie, far apart
    case = Case(sampler, (logits, step, tables), case.attrs)
    arguments = on_torch(spec, case, dtype, PLACE)
    poison()
    got = on_host(kernel("sample", Tuning(pdl=PDL)).run(*arguments, **case.attrs))
    verdict = judge(spec, case, dtype, got)
    assert verdict.passed, f"{sampler} {dtype}, seed {seed}: {verdict}"


def test_make_step_of_many_rows(seed, on_torch, on_host):
    rng, spec = np.random.default_rng(seed), catalog()["make_step"]
    tables = empty_tables(groups=2, slots=151, max_blocks_per_seq=9)
    tables.blocks[:, 1:] = rng.integers(1, 900, (2, 150, 9))
    tables.lengths[1:] = rng.integers(0, 20, 150)
    tables.last[1:] = rng.integers(0, 90, 150)
    slots = rng.permutation(np.arange(1, 151))
    counts = [1] * 90 + [int(n) for n in rng.integers(1, 9, 40)]
    rows = [Row(int(s), [-1] * n) for s, n in zip(slots, counts, strict=False)]
    cells = [BlockTableUpdate(1, int(slot), 8, int(slot) + 7) for slot in slots[:100]]
    bucket = Bucket(sum(counts) + 20, 140)
    message = step_frame(
        bucket, rows, cells, step=1, groups=2, block_size=4, decode_rows=90
    )
    attrs = {"bucket": bucket, "block_size": 4}
    case = Case("many", (message, tables), attrs)
    arguments = on_torch(spec, case, "float32", PLACE)
    poison()
    got = on_host(kernel("make_step", Tuning(pdl=PDL)).run(*arguments, **attrs))
    verdict = judge(spec, case, "float32", got)
    assert verdict.passed, f"seed {seed}: {verdict}"


def test_refuses_shapes_for_which_the_library_is_faster():
    parts = [torch.zeros(size, 40) for size in (30, 5, 5)]

    def refuse(rows, dtype=torch.bfloat16, **limits):
        chosen, x = kernel("norm_qkv", Tuning(**limits)), torch.zeros(rows, 40)
        x, norm = x.to(dtype), Norm(torch.zeros(40))
        return chosen.refuse(x, x, norm, QkvLinear(*parts), eps=1e-5)

    assert refuse(1, torch.float32, max_outputs=39) is None
    assert refuse(8, max_rows=8, max_outputs=40) is None
    said = "matrix of 40 x 40, 2 rows: the library is faster"
    assert said in refuse(2, max_rows=8, max_outputs=39)
    assert refuse(2, max_rows=8, max_outputs=39, max_streamed_rows=2) is None
    assert "8 rows at most, found 9" in refuse(9, max_rows=8)
    assert "1 rows at most, found 2" in refuse(2)
    assert "one row of float32, found 2" in refuse(2, torch.float32, max_rows=8)
    assert "float64" in refuse(1, torch.float64)

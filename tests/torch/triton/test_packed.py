"""Products with packed weights against the float64 bodies."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from selected import selected
from triton_place import DTYPES, IS_SLOW, PDL, PLACE

from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.blocks.encode import encode
from inl.dtypes import HostArray, wrap
from inl.ops import catalog
from inl.ops.linear import Linear, QkvLinear
from inl.ops.mlp import GatedMlp
from inl.ops.norm import Norm
from inl.spec.op import Case, Spec
from inl.spec.tolerance import judge
from quantized_blocks import decoded

# isort: split
from inl_torch.tensors import from_host
from inl_torch.triton.quantized import products as packed_products
from inl_torch.triton.quantized.packed import (
    FLOAT8,
    Packed,
    PackedLinear,
    PackedMlp,
    PackedQkv,
    can_pack,
    packed,
    refuse_mlp,
    refuse_qkv,
)
from inl_torch.triton.tuning import Tuning

TUNING = Tuning(pdl=PDL)
EVERY = list(packed_products.kernels(TUNING))
KERNELS = {k.op: k for k in EVERY}
KINDS = {
    "int4": (torch.uint8, 32, False),
    "int4 with offsets": (torch.uint8, 32, True),
    "int4, wide groups": (torch.uint8, 96, True),
    "int8": (torch.int8, 32, False),
    "int8, a scale a row": (torch.int8, 288, False),
    "int8 with offsets": (torch.int8, 16, True),
    "float8": (FLOAT8, 288, False),
    "float8 in groups": (FLOAT8, 48, False),
}
"""Dtype of codes, codes per scale, and whether there are offsets."""

MAIN = ("int4", "int4 with offsets", "int8", "float8")
"""Those of KINDS whose kernels differ most."""


def matrix(rng, kind, rows, columns):
    """A packed matrix and its dequantized values, exact in every dtype."""
    codes_type, group, has_offsets = KINDS[kind]
    shape = rows, columns // min(group, columns)
    scales = torch.from_numpy(2.0 ** rng.integers(-6, -2, shape)).half()
    offsets = None
    if codes_type == torch.uint8:
        codes = torch.from_numpy(rng.integers(0, 16, (rows, columns), dtype=np.uint8))
    elif codes_type == torch.int8:
        codes = rng.integers(-100, 28, (rows, columns), dtype=np.int8)
        codes = torch.from_numpy(codes)
    else:
        numbers = torch.from_numpy(rng.standard_normal((rows, columns), np.float32))
        codes = numbers.to(FLOAT8)
    values = codes.double() if codes_type != torch.uint8 else codes.double() - 8
    if has_offsets:
        steps = torch.from_numpy(rng.integers(0, 4, shape))
        offsets = (scales * steps * 8).to(scales.dtype)
        values = codes.double()
    width = columns // shape[1]
    values = values * scales.double().repeat_interleave(width, 1)
    if has_offsets:
        values = values + offsets.double().repeat_interleave(width, 1)
    held = packed(codes, scales, offsets)
    return Packed(*(None if p is None else p.to(PLACE) for p in held)), values.numpy()


def poison():
    """Fill memory that later tensors will reuse with NaN."""
    spoiled = [torch.full((size,), float("nan"), device=PLACE) for size in 8 * [65536]]
    del spoiled


def check(op, case, weights, dtype, on_torch, on_host, seed):
    spec = catalog()[op]
    *rest, _ = on_torch(spec, case, dtype, PLACE)
    traced = SimpleNamespace(shape=rest[0].shape, dtype=dtype)
    arguments = traced, *rest[1:], case.args[-1]
    kernel = selected(EVERY, op, arguments, case.attrs)
    poison()
    got = on_host(kernel.run(*rest, weights, **case.attrs))
    verdict = judge(spec, case, dtype, got)
    assert verdict.passed, f"{op}/{case.name} {dtype}, seed {seed}: {verdict}"


def on_place(values, dtype):
    return torch.from_numpy(values).to(PLACE, getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_linear(kind, dtype, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    for tokens, rows in ((1, 5), (1, 70), (2, 33), (17, 7), (70, 9)):
        held, values = matrix(rng, kind, rows, 288)
        bias = rng.integers(-8, 8, rows) / 2 if tokens % 2 else None
        # Inputs that sum to 0, with codes of nonzero mean, leave only rounding.
        x = 0.5 + rng.standard_normal((tokens, 288))
        case = Case(f"{tokens}x{rows}", (x, Linear(values, bias)))
        w = PackedLinear(held, None if bias is None else on_place(bias, dtype))
        check("linear", case, w, dtype, on_torch, on_host, seed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["int4", "int8, a scale a row", "float8"])
def test_any_rows_as_they_are_stored_in_one_launch(kind, dtype, seed, on_host):
    rng = np.random.default_rng(seed)
    tuning = Tuning()
    for tokens, rows in ((1, 70), (2, 33), (70, 40)):
        held, values = matrix(rng, kind, rows, 288)
        bias = rng.integers(-8, 8, rows) / 2 if tokens % 2 else None
        case = Case("rows", (0.5 + rng.standard_normal((tokens, 288)),
                             Linear(values, bias)))  # fmt: skip
        given = None if bias is None else on_place(bias, "float32")
        x = on_place(case.args[0], dtype)
        scales = held.scales.float()
        for _ in range(2):  # the second finds the plan of the first
            poison()
            y = packed_products.multiply_stored(x, held.codes, scales, given, tuning)
            verdict = judge(catalog()["linear"], case, dtype, on_host(y))
            assert verdict.passed, f"{kind} {tokens} rows, seed {seed}: {verdict}"
        if tokens == 70:
            wrong = scales * 1.02
            y = packed_products.multiply_stored(x, held.codes, wrong, given, tuning)
            assert not judge(catalog()["linear"], case, dtype, on_host(y)).passed


def test_all_float8_codes():
    codes = torch.arange(256, dtype=torch.uint8).view(FLOAT8)
    finite = codes.float().isfinite()
    held = packed(torch.where(finite, codes.float(), 0).to(FLOAT8).view(8, 32),
                  torch.ones(8, 1))  # fmt: skip
    want = held.codes.float()
    held = Packed(*(None if p is None else p.to(PLACE) for p in held))
    got = packed_products.dequantized(held, torch.float32)
    assert int(finite.sum()) == 254
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int4 with offsets", "int8"])
@pytest.mark.parametrize("columns", [32, 4128])
def test_short_and_long_rows(columns, kind, dtype, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    for tokens in (1, 3):
        held, values = matrix(rng, kind, 19, columns)
        x = rng.standard_normal((tokens, columns))
        case = Case(f"{tokens}x{columns}", (x, Linear(values)))
        w = PackedLinear(held)
        check("linear", case, w, dtype, on_torch, on_host, seed)


def stacked(parts):
    """Matrices stacked by rows."""
    fields = zip(*parts, strict=True)
    return Packed(*(None if f[0] is None else torch.cat(f) for f in fields))


def qkv(rng, kind, biased, dtype):
    parts = [matrix(rng, kind, rows, 96) for rows in (30, 10, 10)]
    biases = [rng.integers(-8, 8, len(v)) / 2 for _, v in parts] if biased else []
    held = stacked([part for part, _ in parts])
    bias = on_place(np.concatenate(biases), dtype) if biased else None
    weights = PackedQkv(held, held.codes[30:40], bias)
    return weights, QkvLinear(*(values for _, values in parts), *biases)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MAIN)
def test_queries_keys_and_values(kind, dtype, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    for tokens, biased in ((1, True), (7, False)):
        weights, w = qkv(rng, kind, biased, dtype)
        case = Case(f"{tokens}", (rng.standard_normal((tokens, 96)), w))
        check("qkv_linear", case, weights, dtype, on_torch, on_host, seed)
        if tokens == 1:
            residual, delta = rng.standard_normal((2, tokens, 96))
            norm = Norm(rng.standard_normal(96))
            case = Case("norm", (residual, delta, norm, w), {"eps": 1e-5})
            check("norm_qkv", case, weights, dtype, on_torch, on_host, seed)


FEED_FORWARD = [
    (kind, dtype)
    for kind in MAIN
    for dtype in DTYPES
    if not IS_SLOW or dtype != "float32" or kind == MAIN[0]
]


@pytest.mark.parametrize(("kind", "dtype"), FEED_FORWARD)
def test_feed_forward(kind, dtype, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    activation = "gelu_tanh" if kind == "int8" else "silu"
    for tokens in (1, 4):
        gate, up = (matrix(rng, kind, 96, 64 + 32 * (kind == "int4")) for _ in "ab")
        down = matrix(rng, kind, gate[1].shape[1], 96)
        scale = 2.0 ** -np.round(np.log2(np.abs(gate[1]).mean() * 8))
        halved = [Packed(h.codes, *(p if p is None else p * scale for p in h[1:]))
                  for h in (gate[0], up[0])]  # fmt: skip
        w = GatedMlp(gate[1] * scale, up[1] * scale, down[1])
        weights = PackedMlp(stacked(halved), down[0])
        width = w.gate.shape[1]
        attrs = {"activation": activation}
        case = Case(f"{tokens}", (rng.standard_normal((tokens, width)), w), attrs)
        check("gated_mlp", case, weights, dtype, on_torch, on_host, seed)
        if tokens == 1:
            residual, delta = rng.standard_normal((2, tokens, width))
            norm = Norm(rng.standard_normal(width))
            args = residual, delta, norm, w
            case = Case("norm", args, {"eps": 1e-5, **attrs})
            check("norm_mlp", case, weights, dtype, on_torch, on_host, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MAIN)
def test_logits(kind, dtype, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    held, values = matrix(rng, kind, 75, 288)
    residual, delta = rng.standard_normal((2, 3, 288))
    norm, rows = Norm(rng.standard_normal(288)), np.array([2], np.int32)
    args = residual, delta, rows, norm, Linear(values)
    case = Case("one of three", args, {"eps": 1e-5})
    check("norm_logits", case, PackedLinear(held), dtype, on_torch, on_host, seed)


FILE_KINDS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")


class Place:
    def tensor(self, data):
        return from_host(data).to(PLACE)


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_blocks_of_a_file(kind, seed, on_host):
    """Products are accurate to float32, and dequantized values are exact."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((21, 160), np.float32)
    file_kind = gguf.GGMLQuantizationType[kind.upper()]
    data = gguf.quants.quantize(numbers, file_kind)
    source = HostArray(data, kind, numbers.shape)
    w = KERNELS["linear"].pack({"weight": source, "bias": None}, Place(), "float32")
    assert w.weight.shape == numbers.shape
    exact = dequantize(source)
    plain = packed_products.dequantized(w.weight, torch.float32)
    np.testing.assert_allclose(on_host(plain), exact, rtol=0, atol=4e-7)
    x = rng.standard_normal((1, 160), np.float32)
    want = x.astype(np.float64) @ exact.T.astype(np.float64)
    got = on_host(KERNELS["linear"].run(torch.from_numpy(x).to(PLACE), w))
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-6 * np.abs(want).max())


def test_blocks_of_8_bit_floats(seed, on_host):
    """As above; the values are those of E4M3 times a power of two, in any float."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.integers(-30, 30, (21, 1)))
    numbers = (rng.standard_normal((21, 160)) * sizes).astype(np.float32)
    numbers[0, :32] = 0
    source = encode(numbers, "mxfp8")
    w = KERNELS["linear"].pack({"weight": source, "bias": None}, Place(), "float32")
    assert w.weight.codes.dtype == FLOAT8
    exact = decoded(source)
    for dtype in (torch.float32, torch.bfloat16):
        plain = packed_products.dequantized(w.weight, dtype)
        np.testing.assert_array_equal(on_host(plain.float()), exact)
    x = rng.standard_normal((1, 160), np.float32)
    want = x.astype(np.float64) @ exact.T
    got = on_host(KERNELS["linear"].run(torch.from_numpy(x).to(PLACE), w))
    room = 4e-6 * (np.abs(x) @ np.abs(exact).T)
    assert (np.abs(got - want) <= room).all()


def test_dequantized_weights_stay_dense(seed, on_host):
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((21, 48), np.float32)
    group = {"weight": wrap(numbers), "bias": None}
    w = KERNELS["linear"].pack(group, Place(), "float32")
    assert w.weight.scales is None
    x = rng.standard_normal((1, 48), np.float32)
    got = on_host(KERNELS["linear"].run(torch.from_numpy(x).to(PLACE), w))
    np.testing.assert_allclose(got, x @ numbers.T, rtol=0, atol=1e-5)


def test_a_wrong_scale_is_found(seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    held, values = matrix(rng, "int4", 33, 288)
    scales = held.scales.clone()
    scales[7] *= 2
    case = Case("wrong", (rng.standard_normal((1, 288)), Linear(values)))
    w = PackedLinear(held._replace(scales=scales))
    with pytest.raises(AssertionError, match="error"):
        check("linear", case, w, "bfloat16", on_torch, on_host, seed)


def test_refusals():
    four, eight = Spec((32, 64), "q4_1"), Spec((32, 64), "q8_0")
    plain = Spec((32, 64), "bfloat16")
    bias = Spec((32,), "float32")
    assert can_pack(weight=four, bias=bias) is None
    assert "weight is stored as bfloat16" in can_pack(weight=plain)
    assert "several kinds: q4_1, q8_0" in refuse_qkv(q=four, k=four, v=eight)
    assert "gate is stored as q4_1, up as q8_0" in refuse_mlp(
        gate=four, up=eight, down=four
    )
    rows = KERNELS["norm_qkv"].refuse(torch.zeros(2, 4), None, None, None, eps=1e-5)
    assert "takes 1 row, found 2" in rows
    with pytest.raises(ValueError, match="found 40 columns in 1 groups"):
        packed(torch.zeros(2, 40, dtype=torch.int8), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"codes: found torch\.float32"):
        packed(torch.zeros(2, 32), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"scales: found \[1, 1\]"):
        packed(torch.zeros(2, 32, dtype=torch.int8), torch.ones(1, 1))

"""Products with weights of 8 and 4 bits against the float64 bodies.

What multiplies E4M3 rounds its rows, as declared.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from selected import selected
from triton_place import IS_SLOW, PDL, PLACE

from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.blocks.encode import encode
from inl.dtypes import HostArray, wrap
from inl.ops import catalog
from inl.ops.linear import Linear, QkvLinear
from inl.ops.mlp import GatedMlp
from inl.ops.norm import Norm
from inl.spec.activation_quant import FLOAT8, float8_rows
from inl.spec.kernel import PLAIN
from inl.spec.op import Case, Spec
from inl.spec.strict_array import StrictArray
from inl.spec.tolerance import judge
from inl.spec.weights import Group, Param
from inl.weights.plan import plan_weights

# isort: split
from inl_torch import eager
from inl_torch.tensors import from_host
from inl_torch.triton.float8 import products, weights
from inl_torch.triton.float8.weights import FLOAT8_ROWS, Float8
from inl_torch.triton.int4 import products as int4
from inl_torch.triton.int4.weights import INT4_CHUNKS, Int4, refuse_int4
from inl_torch.triton.tuning import Tuning

TUNING = Tuning(pdl=PDL)
EVERY = [*products.float8_kernels(TUNING), *int4.int4_kernels(TUNING)]
KERNELS = {(one.op, one.layout): one for one in EVERY}
KINDS = ("mxfp8", "q4_1", "q4_0", "q4_1, wide")
HALVES = ("bfloat16", "float16")
DTYPES = (*HALVES, "float32")
SIZES = (
    (1, 48, 288),
    (2, 80, 64),
    (17, 32, 544),
    (25, 48, 96),
    (34, 48, 96),
    (35, 80, 256),
)
"""Rows, and rows and columns of the matrix."""
EPS = {"eps": 1e-5}
MOST = 33
"""Most rows that the tests stream, for the interpreter is slow."""


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    for module in (products, int4):
        monkeypatch.setattr(module, "MAX_STREAMED", MOST)
    monkeypatch.setattr(int4, "TOKENS", 16)
    monkeypatch.setattr(int4, "MOST_EXACT", 20)
    monkeypatch.setattr(int4, "LEAST_ROUNDED", 64)
    monkeypatch.setattr(int4, "LEAST_COPIED", 21)
    monkeypatch.setattr(int4, "LARGE_TILE_BYTES", 0)


def packed(op, kind, group, dtype):
    """Pack a group of weights of a kind."""
    layout = FLOAT8_ROWS if kind == "mxfp8" else INT4_CHUNKS
    return KERNELS[op, layout].pack(group, Place(), dtype)


def packed_twice(op, group, dtype):
    """Pack a group of weights of 4 bits with copies in E4M3."""
    kernels = int4.int4_kernels(TUNING, int4.copied_int4)
    kernel = next(one for one in kernels if one.op == op)
    return kernel.pack(group, Place(), dtype)


class Place:
    def tensor(self, data):
        return from_host(data).to(PLACE)


def stored(rng, rows, columns, kind="mxfp8"):
    """A matrix of blocks whose scales differ by powers of two, and its values."""
    spread = 2.0 ** rng.integers(-3, 3, (rows, columns // 32)).repeat(32, 1)
    values = (rng.standard_normal((rows, columns)) * spread / 8).astype(np.float32)
    blocks = encode(values, "q4_1" if kind.startswith("q4") else kind)
    heads = blocks.data.reshape(rows, -1, 20 if kind != "mxfp8" else 33)
    if kind == "q4_1, wide":
        heads[:, :, :4] = np.repeat(heads[:, ::4, :4], 4, 1)
    if kind == "q4_0":
        plain = np.ascontiguousarray(np.delete(heads, (2, 3), 2)).reshape(rows, -1)
        blocks = HostArray(plain, kind, values.shape)
    return blocks, dequantize(blocks, "a matrix").astype(np.float64)


def exact(matrix):
    """The weights of a matrix that was packed: shifted codes may be rounded."""
    module = int4 if isinstance(matrix, Int4) else products
    return module.decoded(matrix, torch.float32).double().cpu().numpy()


def inputs(rng, rows, columns):
    """Rows with outliers, and one of zeros."""
    x = rng.standard_normal((rows, columns))
    x[:, ::48] *= 16
    x[1:2] = 0
    return x


def check(op, case, packed, dtype, on_torch, on_host, seed):
    spec = catalog()[op]
    *rest, _ = on_torch(spec, case, dtype, PLACE)
    traced = SimpleNamespace(shape=rest[0].shape, dtype=dtype)
    kernels = [one for one in EVERY if one.layout == packed.layout]
    kernel = selected(kernels, op, (traced, *rest[1:], case.args[-1]), case.attrs)
    got = on_host(kernel.run(*rest, packed, **case.attrs))
    is_exact = isinstance(packed[0], Int4) and int4.is_exact(rest[0], packed[0])
    is_rounded = dtype != "float32" and not is_exact
    quant = kernel.activation_quant if is_rounded else ""
    verdict = judge(spec, case, dtype, got, quant)
    assert verdict.passed, f"{op}/{case.name} {dtype}, seed {seed}: {verdict}"


PAIRS = [(dtype, kind) for dtype in DTYPES for kind in KINDS]
if IS_SLOW:  # each kind in bfloat16, and each other dtype in the two ways to multiply
    PAIRS = [("bfloat16", kind) for kind in KINDS]
    PAIRS += [("float16", "q4_1"), ("float32", "mxfp8"), ("float32", "q4_1, wide")]


@pytest.mark.parametrize(("dtype", "kind"), PAIRS)
def test_linear(dtype, kind, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    for tokens, rows, columns in SIZES:
        step = {"mxfp8": 32, "q4_1, wide": 256}.get(kind, 64)
        columns = -(-columns // step) * step
        blocks, values = stored(rng, rows, columns, kind)
        bias = rng.integers(-8, 8, rows) / 2 if tokens % 2 else None
        held = None if bias is None else wrap(bias.astype(np.float32))
        w = packed("linear", kind, {"weight": blocks, "bias": held}, dtype)
        assert kind == "mxfp8" or w.weight.width == (128 if "wide" in kind else 32)
        if dtype == "float32":  # exact, but for codes that were shifted
            values = exact(w.weight)
        args = inputs(rng, tokens, columns), Linear(values, bias)
        case = Case(f"{tokens}x{rows}", args)
        check("linear", case, w, dtype, on_torch, on_host, seed)


@pytest.mark.parametrize("kind", ["mxfp8", "q4_1", "q4_1, wide"])
def test_columns_divided_between_programs(kind, seed, on_torch, on_host):
    rng, dtype = np.random.default_rng(seed), "bfloat16"
    width = 9 * 1024 if kind == "mxfp8" else 2048
    blocks, values = stored(rng, 48, width, kind)
    w = packed("linear", kind, {"weight": blocks}, dtype)
    assert products.float8_tile(48, width, 16, TUNING, gated=False).splits == 2
    assert int4.stream_tile(48, width // 256, 16, TUNING, gated=False).splits > 2
    assert int4.rounded_tile(48, width, 32, 16, TUNING).splits > 2
    for tokens in (1, 3, 20):  # the counters serve several launches
        case = Case(f"{tokens}", (inputs(rng, tokens, width), Linear(values)))
        check("linear", case, w, dtype, on_torch, on_host, seed)


@pytest.mark.parametrize(("kind", "dtype"), [
    ("mxfp8", "bfloat16"), ("mxfp8", "float16"), ("q4_0", "bfloat16"),
    ("q4_1, wide", "float16"),
])  # fmt: skip
def test_queries_keys_and_values(kind, dtype, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    width = 256 if "wide" in kind else 128
    made = [stored(rng, rows, width, kind) for rows in (32, 16, 16)]
    blocks, values = zip(*made, strict=True)
    group = dict(zip("qkv", blocks, strict=True))
    bias = wrap(rng.integers(-8, 8, 16).astype(np.float32))
    for tokens, biases in ((1, {"k_bias": bias}), (7, {}), (34, {"k_bias": bias})):
        w = packed("qkv_linear", kind, group | biases, dtype)
        logical = QkvLinear(*values, None, bias.data if biases else None, None)
        case = Case(f"{tokens}", (inputs(rng, tokens, width), logical))
        check("qkv_linear", case, w, dtype, on_torch, on_host, seed)
        delta = rng.standard_normal((tokens, width))
        residual, norm = inputs(rng, tokens, width), Norm(rng.standard_normal(width))
        case = Case(f"norm {tokens}", (residual, delta, norm, logical), {"eps": 1e-5})
        if tokens > MOST and kind != "mxfp8":
            continue
        check("norm_qkv", case, w, dtype, on_torch, on_host, seed)


@pytest.mark.parametrize("kind", ["q4_1", "q4_1, wide"])
def test_many_rows_multiply_copies(kind, seed, on_torch, on_host, monkeypatch):
    """Few rows do not, and no row decodes 4 bits then; float32 multiplies no copy."""
    rng, width, inner = np.random.default_rng(seed), 256, 512
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    made = {name: stored(rng, *shape, kind) for name, shape in shapes.items()}
    blocks = {name: one[0] for name, one in made.items()}
    logical = GatedMlp(**{name: one[1] for name, one in made.items()})
    w = packed_twice("gated_mlp", blocks, "bfloat16")
    codes, scales = int4.rounded(w.gate_up)
    assert torch.equal(w.gate_up.copy.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(w.gate_up.copy.scales, scales)
    spec = {name: StrictArray(one, "bfloat16", layout=INT4_CHUNKS, stored_bytes=1)
            for name, one in shapes.items()}  # fmt: skip
    held = (w.gate_up.copy, w.down.copy)
    sizes = sum(each.nbytes for one in held for each in one)
    assert int4.copied_bytes(GatedMlp(**spec)) == sizes
    plain = {name: StrictArray(one, "bfloat16") for name, one in shapes.items()}
    assert int4.copied_bytes(GatedMlp(**plain)) == 0
    monkeypatch.setattr(int4, "rounded", None)
    monkeypatch.setattr(int4, "decoded", None)
    attrs = {"activation": "silu"}
    norm = Norm(rng.standard_normal(width))
    for tokens in (20, 21, 34):
        if tokens == 21:  # from here on the codes of 4 bits are not read
            gate_up, down = w.gate_up, w.down
            w = w._replace(
                gate_up=gate_up._replace(codes=torch.full_like(gate_up.codes, 255)),
                down=down._replace(codes=torch.full_like(down.codes, 255)),
            )
            # Their rounding has a test of its own.
            logical = GatedMlp(*np.split(exact(gate_up.copy), 2), exact(down.copy))
        x, delta = inputs(rng, tokens, width), rng.standard_normal((tokens, width))
        case = Case(f"{tokens}", (x, logical), attrs)
        check("gated_mlp", case, w, "bfloat16", on_torch, on_host, seed)
        args = x, delta, norm, logical
        case = Case(f"norm {tokens}", args, {"eps": 1e-5, **attrs})
        check("norm_mlp", case, w, "bfloat16", on_torch, on_host, seed)
    assert int4.copy_for(torch.zeros(34, width), w.gate_up) is None
    small = {"weight": stored(rng, 48, 256, kind)[0]}
    assert packed_twice("linear", small, "bfloat16").weight.copy is None


@pytest.mark.parametrize("kind", ["q4_0", "q4_1, wide"])
def test_many_rows_are_normed_and_rounded_by_one_launch(kind, seed, on_torch, on_host):
    """Decoded weights, rounded to E4M3, as the reference: see above."""
    rng, width = np.random.default_rng(seed), 256
    blocks = [stored(rng, rows, width, kind)[0] for rows in (128, 64, 64)]
    w = packed("qkv_linear", kind, dict(zip("qkv", blocks, strict=True)), "bfloat16")
    assert w.weight.copy is None
    parts = np.split(exact(int4.rounded(w.weight)), (128, 192))
    args = inputs(rng, 34, width), rng.standard_normal((34, width))
    logical = QkvLinear(*parts, None, None, None)
    case = Case("norm", (*args, Norm(rng.standard_normal(width)), logical), EPS)
    check("norm_qkv", case, w, "bfloat16", on_torch, on_host, seed)


@pytest.mark.parametrize(("kind", "dtype", "activation"), [
    ("mxfp8", "bfloat16", "silu"), ("mxfp8", "float16", "gelu_tanh"),
    ("mxfp8", "float32", "silu"), ("q4_1", "bfloat16", "gelu_tanh"),
    ("q4_0", "float16", "silu"), ("q4_1", "float32", "silu"),
    ("q4_1, wide", "bfloat16", "silu"), ("q4_1, wide", "float16", "gelu_tanh"),
])  # fmt: skip
def test_feed_forward(kind, dtype, activation, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    width, inner = (256, 512) if "wide" in kind else (64, 128)
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    made = {name: stored(rng, *shape, kind) for name, shape in shapes.items()}
    w = packed("gated_mlp", kind, {name: one[0] for name, one in made.items()}, dtype)
    logical = GatedMlp(**{name: one[1] for name, one in made.items()})
    if dtype == "float32":
        logical = GatedMlp(*np.split(exact(w.gate_up), 2), exact(w.down))
    for tokens in (1, 5, 34):
        attrs = {"activation": activation}
        case = Case(f"{tokens}", (inputs(rng, tokens, width), logical), attrs)
        check("gated_mlp", case, w, dtype, on_torch, on_host, seed)
        if dtype == "float32" or (tokens > MOST and kind != "mxfp8"):
            continue
        delta = rng.standard_normal((tokens, width))
        norm = Norm(rng.standard_normal(width))
        args = inputs(rng, tokens, width), delta, norm, logical
        case = Case(f"norm {tokens}", args, {"eps": 1e-5, **attrs})
        check("norm_mlp", case, w, dtype, on_torch, on_host, seed)


def test_rows_are_rounded_as_declared(seed):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(inputs(rng, 9, 320).astype(np.float32)).bfloat16().to(PLACE)
    rows = products.quantized(x, TUNING)
    assert_rounded(rows, x)


def assert_rounded(rows, x):
    """A quotient by another way may fall on the other side of the middle of two codes:
    of up to 2 % of bfloat16 numbers, if the scale is close to a power of two.
    """
    got = rows.codes.float().cpu().numpy() * rows.scales.cpu().numpy()[:, None]
    want = float8_rows(x.float().cpu().numpy())
    assert np.isclose(got, want, rtol=1e-5).mean() > 0.95
    least = float(rows.scales.max()) * 2**-8
    np.testing.assert_allclose(got, want, rtol=2**-3 + 2**-10, atol=least)


@pytest.mark.parametrize("kind", ["q4_1", "q4_0", "q4_1, wide"])
def test_decoded_weights_are_rounded_to_the_nearest(kind, seed):
    rng = np.random.default_rng(seed)
    blocks, values = stored(rng, 50, 512, kind)
    w = packed("linear", kind, {"weight": blocks}, "bfloat16").weight
    codes, scales = (each.cpu() for each in int4.rounded(w))
    scales = scales.double().numpy()[:, None]
    size = np.abs(values)
    # The scale is that of the largest number that codes may be, here up to twice it.
    assert (size.max(1, keepdims=True) <= 448.001 * scales).all()
    assert (size.max(1, keepdims=True) >= 200 * scales).all()
    error = np.abs(codes.double().numpy() * scales - values)
    assert (error <= np.maximum(2**-4 * size, 2**-10 * scales) * 1.001).all()


def test_the_declared_rounding_is_that_of_torch(seed):
    x = np.random.default_rng(seed).standard_normal((5, 333)).astype(np.float32)
    x[0, :8] *= 1e4
    scale = torch.from_numpy(x).abs().amax(1, keepdim=True).double() / 448
    codes = (torch.from_numpy(x).double() / scale).float().to(torch.float8_e4m3fn)
    want = (codes.double() * scale).numpy()
    got = float8_rows(x.astype(np.float64))
    assert np.mean(got != want) < 0.01
    np.testing.assert_allclose(got, want, rtol=2**-3, atol=float(scale.max()) * 2**-8)


def test_a_row_that_is_not_finite_stays_so(seed):
    rng = np.random.default_rng(seed)
    blocks, _ = stored(rng, 48, 96)
    w = packed("linear", "mxfp8", {"weight": blocks}, "bfloat16")
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.from_numpy(rng.standard_normal((3, 96))).bfloat16().to(PLACE)
        x[1, 5] = bad
        y = KERNELS["linear", FLOAT8_ROWS].run(x, w).cpu()
        assert not y[1].isfinite().any()
        assert y[[0, 2]].isfinite().all()


def test_shifted_codes_keep_their_values(seed):
    """Only elements that are subnormal at the scale of their row are rounded."""
    rng = np.random.default_rng(seed)
    blocks, values = stored(rng, 48, 96)
    w = packed("linear", "mxfp8", {"weight": blocks}, "bfloat16")
    scales = w.weight.scales.double().cpu().numpy()[:, None]
    assert (np.abs(values).max(1, keepdims=True) >= 224 * scales).all()
    error = np.abs(exact(w.weight) - values)
    assert (error[np.abs(values) >= 2**-6 * scales] == 0).all()
    assert (error <= 2**-10 * scales).all()


def test_matrices_that_are_refused():
    def reason(**stored):
        return weights.refuse_float8(**stored)

    assert reason(weight=Spec((32, 64), "mxfp8")) is None
    assert "q8_0" in reason(weight=Spec((32, 64), "q8_0"))
    assert "40 x 64" in reason(weight=Spec((40, 64), "mxfp8"))
    assert refuse_int4(weight=Spec((40, 64), "q4_0")) is None
    assert "mxfp8" in refuse_int4(weight=Spec((40, 64), "mxfp8"))
    assert "96 columns" in refuse_int4(weight=Spec((40, 96), "q4_0"))
    both = {"gate": Spec((32, 64), "mxfp8"), "up": Spec((32, 64), "q4_1")}
    assert refuse_int4(**both)
    assert weights.refuse_float8(**both)
    assert KERNELS["linear", FLOAT8_ROWS].activation_quant == FLOAT8


def test_scales_of_a_file_stay(seed):
    """One float32 for each row, which no power of two replaces."""
    rng = np.random.default_rng(seed)
    scales = rng.uniform(0.5, 2, (32, 1)).astype(np.float32)
    codes = rng.integers(0, 127, (32, 256), np.uint8)
    heads = np.ascontiguousarray(scales).view(np.uint8)
    blocks = [heads, codes[:, :128], heads, codes[:, 128:]]
    given = HostArray(np.concatenate(blocks, 1), "fp8_128", (32, 256))
    w = packed("linear", "mxfp8", {"weight": given}, "bfloat16")
    assert w.layout == FLOAT8_ROWS
    np.testing.assert_array_equal(w.weight.scales.cpu().numpy(), scales[:, 0])
    np.testing.assert_array_equal(exact(w.weight), dequantize(given, "a matrix"))


@pytest.mark.parametrize("kind", ["mxfp8", "q4_1"])
def test_shards_whose_blocks_were_decoded(kind, seed, on_torch, on_host):
    """A rank's columns of the down projection may end within a block."""
    rng, dtype = np.random.default_rng(seed), "bfloat16"
    made = {name: stored(rng, 48, 64, kind) for name in ("gate", "up")}
    down = rng.integers(-8, 8, (64, 48)) / 8
    blocks = {name: one[0] for name, one in made.items()}
    shard = HostArray(to_bfloat16(down), dtype, down.shape)
    kernels = products.float8_kernels if kind == "mxfp8" else int4.int4_kernels
    kernel = next(one for one in kernels(TUNING) if one.op == "gated_mlp")
    w = kernel.pack(blocks | {"down": shard}, Place(), dtype)
    assert w.layout == kernel.layout
    logical = GatedMlp(made["gate"][1], made["up"][1], down)
    attrs = {"activation": "silu"}
    for tokens in (1, 34):
        case = Case(f"{tokens}", (inputs(rng, tokens, 64), logical), attrs)
        check("gated_mlp", case, w, dtype, on_torch, on_host, seed)
        if tokens > MOST and kind == "q4_1":
            continue
        args = inputs(rng, tokens, 64), inputs(rng, tokens, 64)
        norm = Norm(rng.standard_normal(64))
        case = Case(f"norm {tokens}", (*args, norm, logical), {"eps": 1e-5, **attrs})
        check("norm_mlp", case, w, dtype, on_torch, on_host, seed)


def to_bfloat16(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def test_rows_of_large_models_are_rounded(seed):
    """Wider than the norms of any model: inner sizes of the largest."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(inputs(rng, 2, 28672).astype(np.float32)).bfloat16().to(PLACE)
    assert_rounded(products.quantized(x, TUNING), x)
    assert "65536 at most" in weights.refuse_float8(weight=Spec((16, 1 << 17), "mxfp8"))


def test_layouts_without_an_invariant_kernel_are_not_chosen():
    group = Group("linear", weight=Param("w", (32, 64)))
    kernels = (*eager.kernels(), *products.float8_kernels(TUNING))
    stored = {"w": Spec((32, 64), "mxfp8")}
    assert plan_weights(group, kernels, stored).layout == FLOAT8_ROWS
    assert plan_weights(group, kernels, stored, invariant=True).layout == PLAIN


def test_a_matrix_needs_no_copy_of_another_dtype():
    blocks = HostArray(np.zeros((16, 33), np.uint8), "mxfp8", (16, 32))
    w = packed("linear", "mxfp8", {"weight": blocks}, "bfloat16").weight
    assert isinstance(w, Float8)
    assert [one.dtype for one in w] == [torch.float8_e4m3fn, torch.float32]

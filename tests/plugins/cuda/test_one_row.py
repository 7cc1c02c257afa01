"""Kernels of one row in CUDA C++, beside float64. Needs a Hopper GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inl.ops.norm import Norm
from inl.spec.cache import Cache
from inl_cuda.one_row import attention
from inl_cuda.one_row.products import OneRowProducts
from inl_torch.triton.float8.weights import Float8
from inl_torch.triton.int4.products import decoded as int4_decoded
from inl_torch.triton.int4.weights import Int4

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a GPU of compute capability 9.0",
)

EPS = 1e-5
GPU = "cuda"
TOLERANCES = {torch.bfloat16: 4e-3, torch.float16: 1e-3}
PRODUCTS = OneRowProducts(132)
SHAPES = ((4096, 4096), (6144, 4096), (4096, 14336), (64, 256), (16, 512), (1008, 768),
          (4112, 3584), (5328, 2560), (2064, 11008), (151936, 1024))  # fmt: skip


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def float8(n: int, k: int) -> Any:
    codes = torch.randn(n, k, device=GPU).to(torch.float8_e4m3fn)
    return Float8(codes, torch.rand(n, device=GPU) * 0.01 + 0.01)


def int4(n: int, k: int) -> Any:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=GPU)
    scales = (torch.rand(n, k // 128, device=GPU) * 0.01 + 0.005).half()
    zeros = torch.randint(0, 16, scales.shape, device=GPU)
    return Int4(codes, scales, (-zeros * scales.float()).half())


def dense(w: Any) -> Any:
    if isinstance(w, Float8):
        return w.codes.double() * w.scales.double()[:, None]
    return int4_decoded(w, torch.float32).double()


def error(out: Any, right: Any) -> float:
    return ((out.double() - right).norm() / right.norm()).item()


def row(k: int, dtype: Any) -> Any:
    x = torch.randn(1, k, device=GPU, dtype=dtype)
    x[0, 3] = 300.0
    return x


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", SHAPES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("make", [float8, int4])
@pytest.mark.parametrize("pdl", [False, True])
def test_products_equal_float64(make: Any, size: Any, dtype: Any, pdl: bool) -> None:
    w = make(*size)
    x, delta = row(size[1], dtype), row(size[1], dtype)
    assert PRODUCTS.takes(x, w)
    bias = torch.randn(size[0], device=GPU, dtype=dtype)
    right = dense(w) @ x[0].double() + bias.double()
    assert error(PRODUCTS.multiply(x, w, bias, pdl=pdl)[0], right) < TOLERANCES[dtype]
    gain = torch.rand(size[1], device=GPU, dtype=dtype) + 0.5
    total = x.double() + delta.double()
    normed = total * (total.pow(2).mean() + EPS).rsqrt() * gain.double()
    right = dense(w) @ normed[0]
    summed, y = PRODUCTS.norm_multiply(x, delta, Norm(gain), EPS, w, None, pdl=pdl)
    assert error(summed, total) < TOLERANCES[dtype]
    assert error(y[0], right) < TOLERANCES[dtype]


@pytest.mark.parametrize("make", [float8, int4])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [(28672, 4096), (96, 256), (1008, 2560)])
def test_gated_products_equal_float64(make: Any, size: Any, name: str) -> None:
    w, x = make(*size), torch.randn(1, size[1], device=GPU, dtype=torch.bfloat16)
    gate, up = (dense(w) @ x[0].double()).chunk(2)
    functions = torch.nn.functional
    act = functions.silu if name == "silu" else functions.gelu
    right = act(gate) if name == "silu" else act(gate, approximate="tanh")
    y = PRODUCTS.multiply(x, w, None, gated=name, pdl=False)
    assert error(y[0], right * up) < 8e-3


@pytest.mark.parametrize("make", [float8, int4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_products_of_rows_that_are_not_finite_are_nan(make: Any, bad: float) -> None:
    w, x = make(64, 512), torch.ones(1, 512, device=GPU, dtype=torch.bfloat16)
    x[0, 100] = bad
    assert PRODUCTS.multiply(x, w, None, pdl=False).isnan().all()
    zeros = torch.zeros_like(x)
    assert not PRODUCTS.multiply(zeros, w, None, pdl=False).any()


HEADS = ((32, 8, 128), (9, 3, 64), (28, 4, 128), (8, 8, 128), (64, 8, 128))


@pytest.mark.parametrize(("window", "cap"), [(None, None), (100, None), (None, 30.0)])
@pytest.mark.parametrize("position", [0, 1, 15, 16, 127, 1000, 5003])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_attention_equals_float64(
    heads: Any, position: int, dtype: Any, window: Any, cap: Any, index: Any
) -> None:
    count, kv_heads, d = heads
    size, width = 16, 400
    shape = (width + 1, size, kv_heads, d)
    k_cache, v_cache = (torch.randn(shape, device=GPU, dtype=dtype) for _ in range(2))
    table = (torch.randperm(width, device=GPU) + 1).to(index)
    # Slots that hold no key are not read.
    places = table[torch.arange(position, width * size, device=GPU) // size].long()
    free = places * size + torch.arange(position, width * size, device=GPU) % size
    for cached in (k_cache, v_cache):
        cached.view(-1, kv_heads, d)[free] = float("nan")
    own = int(table[position // size]) * size + position % size
    step = SimpleNamespace(
        positions=torch.tensor([position], device=GPU, dtype=index),
        blocks=table.view(1, 1, width),
        writes=torch.tensor([[own]], device=GPU, dtype=index),
        used_counts=torch.tensor([1, 1, 1], device=GPU, dtype=index),
    )
    q, k, v = (torch.randn(1, n, d, device=GPU, dtype=dtype)
               for n in (count, kv_heads, kv_heads))  # fmt: skip
    angle = torch.rand(1, d // 2, device=GPU) * 6
    cos, sin = angle.cos(), angle.sin()
    cache = Cache(k_cache, v_cache)
    step.lengths = step.positions + 1
    assert attention.refuse(q, k, v, cos, sin, cache, step) is None
    out, _ = attention.rope_attend(
        q, k, v, cos, sin, cache, step, scale=d**-0.5, window=window, cap=cap,
        group=0, pdl=False,
    )  # fmt: skip

    def rotated(x: Any) -> Any:
        a, b = x.double()[0].chunk(2, 1)
        c, s = cos.double(), sin.double()
        return torch.cat([a * c - b * s, b * c + a * s], 1)

    right_key = rotated(k).to(dtype)
    assert error(k_cache.view(-1, kv_heads, d)[own], right_key.double()) < 1e-3
    assert torch.equal(v_cache.view(-1, kv_heads, d)[own], v[0])
    seen = torch.arange(position + 1, device=GPU)
    if window:
        seen = seen[-window:]
    slots = table[seen // size].long() * size + seen % size
    keys, values = (c.view(-1, kv_heads, d)[slots].double() for c in (k_cache, v_cache))
    queries = rotated(q).to(dtype).double().view(kv_heads, -1, d)
    scores = torch.einsum("hgd,thd->hgt", queries, keys) * d**-0.5
    if cap:
        scores = cap * torch.tanh(scores / cap)
    right = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values)
    assert error(out.view(kv_heads, -1, d), right) < TOLERANCES[dtype]


def test_attention_of_padding_is_zero() -> None:
    cache = Cache(*(torch.full((4, 16, 4, 128), float("nan"), device=GPU).half()
                    for _ in range(2)))  # fmt: skip
    step = SimpleNamespace(
        positions=torch.tensor([20], device=GPU),
        blocks=torch.zeros((1, 1, 3), device=GPU, dtype=torch.int32),
        writes=torch.zeros((1, 1), device=GPU, dtype=torch.int32),
        used_counts=torch.zeros(3, device=GPU, dtype=torch.int32),
    )
    q, k = (torch.randn(1, n, 128, device=GPU).half() for n in (16, 4))
    turn = torch.ones(1, 64, device=GPU)
    out, _ = attention.rope_attend(
        q, k, k, turn, turn, cache, step, scale=0.1, window=None, cap=None, group=0,
        pdl=False,
    )  # fmt: skip
    assert not out.any()

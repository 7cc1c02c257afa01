"""Kernels of one row in CUDA C++ compile, without a GPU; and what they accept."""

from __future__ import annotations

import logging
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inl.errors import DeviceError
from inl.ops.norm import Norm
from inl.spec.cache import Cache
from inl_cuda.one_row import attention, compiler, kernels, products
from inl_cuda.one_row.products import OneRowProducts
from inl_torch.triton.float8.weights import Float8
from inl_torch.triton.int4.weights import Int4
from inl_torch.triton.matmul.stored import Plain

ARCH = "sm_90a"
PRODUCTS = OneRowProducts(132)


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INL_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def defined(**values: int) -> tuple[str, ...]:
    return tuple(f"-D{name}={value}" for name, value in values.items())


def product_options(k: int, **values: int) -> tuple[str, ...]:
    given = {"K": k, "INT4": 0, "BFLOAT16": 1, "NORMED": 0, "GATED": 0, "HAS_BIAS": 0,
             "THREADS": 512, "RESIDENT": 1, "DEPTH": 2, "EARLY": 2,
             "PDL": 1}  # fmt: skip
    return defined(**{**given, **values})


@pytest.mark.parametrize("k", [16, 4096, 14336])
@pytest.mark.parametrize("int4", [0, 1])
@pytest.mark.parametrize("values", [
    {"NORMED": 1}, {"NORMED": 1, "GATED": 1, "PDL": 0}, {"GATED": 2, "BFLOAT16": 0},
    {"HAS_BIAS": 1},
], ids=str)  # fmt: skip
def test_products_compile(k: int, int4: int, values: dict[str, int]) -> None:
    options = product_options(max(k, 256) if int4 else k, INT4=int4, **values)
    code = compiler.compiled(compiler.source_of("product.cu"), options, ARCH)
    assert code.startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("d", "group", "windowed", "capped", "wide"),
    [
        (64, 3, 0, 0, 0),
        (64, 8, 1, 1, 1),
        (128, 4, 0, 0, 1),
        (128, 4, 1, 0, 0),
        (128, 4, 0, 1, 0),
        (128, 8, 1, 1, 1),
    ],
)
def test_attention_compiles(
    d: int, group: int, windowed: int, capped: int, wide: int
) -> None:
    options = defined(
        D=d, GROUP=group, SIZE=16, RANKS=16, THREADS=128, BFLOAT16=1 - capped,
        WINDOWED=windowed, CAPPED=capped, WIDE_POSITIONS=wide, WIDE_TABLE=0,
        WIDE_WRITES=wide, WIDE_COUNTS=0, PDL=wide,
    )  # fmt: skip
    code = compiler.compiled(compiler.source_of("attention.cu"), options, ARCH)
    assert code.startswith(b"\x7fELF")


def test_code_comes_from_the_cache_unless_it_is_damaged(
    cache_of_its_own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = 'extern "C" __global__ void f(float* x) { x[0] = VALUE; }'
    code = compiler.compiled(source, ("-DVALUE=1",), ARCH)
    (path,) = cache_of_its_own.iterdir()
    assert compiler.compiled(source, ("-DVALUE=2",), ARCH) != code
    compiled = compiler.compile_source
    monkeypatch.setattr(compiler, "compile_source", None)  # not called
    assert compiler.compiled(source, ("-DVALUE=1",), ARCH) == code
    monkeypatch.setattr(compiler, "compile_source", compiled)
    for damaged in (b"", path.read_bytes()[:-1], b"\0" * 100):
        path.write_bytes(damaged)
        assert compiler.compiled(source, ("-DVALUE=1",), ARCH) == code
        assert path.read_bytes().endswith(code)


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("INL_CACHE", str(tmp_path / "file"))
    assert compiler.compiled('extern "C" __global__ void f() {}', (), ARCH)


def test_an_error_has_the_log_of_the_compiler() -> None:
    with pytest.raises(DeviceError, match=r"-DA=1.*\n?.*identifier \"wrong\""):
        compiler.compile_source("__global__ void f() { wrong; }", ["-DA=1"])


def test_without_the_bindings_triton_is_used_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert kernels.can_compile.__wrapped__()
    for name in ("attention", "compiler", "products"):
        monkeypatch.delitem(sys.modules, f"inl_cuda.one_row.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with caplog.at_level(logging.WARNING):
        assert not kernels.can_compile.__wrapped__()
    assert "pip install cuda-bindings nvidia-cuda-nvrtc" in caplog.text


def float8(n: int, k: int) -> Any:
    return Float8(torch.empty(n, k, dtype=torch.float8_e4m3fn), torch.empty(n))


def int4(n: int, k: int, width: int = 128) -> Any:
    groups = torch.empty(n, k // width, dtype=torch.float16)
    return Int4(torch.empty(n, k // 2, dtype=torch.uint8), groups, groups)


class Launched:
    """A kernel that compiles, but is not launched."""

    has_room = True

    def __init__(self, code: bytes, types: tuple[Any, ...]) -> None:
        self.code, self.types, self.shared = code, types, 0

    def allow_shared(self, size: int) -> None:
        assert size <= 227 << 10
        self.shared = size

    def allow_cluster(self, programs: int, threads: int) -> bool:
        return self.has_room

    def launch(
        self, programs: int, threads: int, shared: int, arguments: Any, *,
        cluster: int = 1, pdl: bool,
    ) -> None:  # fmt: skip
        assert self.code.startswith(b"\x7fELF")
        assert shared in (0, self.shared)
        assert programs % cluster == 0
        assert programs > 0
        assert threads % 32 == 0
        for one, kind in zip(arguments, self.types, strict=True):
            kind(one)  # raises for a value of another type


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Options of the kernels that are launched."""
    seen: list[tuple[str, ...]] = []

    def function_of(
        file: str, name: str, types: Any, options: Any, place: Any
    ) -> Launched:
        given = tuple(f"-D{key}={value}" for key, value in options)
        source = compiler.source_of(file)
        assert f"{name}(const u16*" in source
        seen.append(given)
        return Launched(compiler.compiled(source, given, ARCH), types)

    monkeypatch.setattr(products, "function_of", function_of)
    monkeypatch.setattr(attention, "function_of", function_of)
    return seen


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_launches_have_the_arguments_of_the_kernels(
    launched: list[tuple[str, ...]], dtype: torch.dtype, pdl: bool
) -> None:
    x = torch.ones(1, 512, dtype=dtype)
    for make in (float8, int4):
        w, bias = make(64, 512), torch.ones(64, dtype=dtype)
        assert PRODUCTS.multiply(x, w, bias, pdl=pdl).shape == (1, 64)
        beside = torch.ones(513, dtype=dtype)[1:][None]  # not aligned
        summed, y = PRODUCTS.norm_multiply(
            x, beside, Norm(beside[0]), 1e-5, w, None, gated="silu", pdl=pdl
        )
        assert summed.shape == (1, 512)
        assert y.shape == (1, 32)
    q, k = torch.ones(1, 16, 128, dtype=dtype), torch.ones(1, 4, 128, dtype=dtype)
    index = torch.ones(3, dtype=torch.int64)
    step = SimpleNamespace(
        positions=index[:1], used_counts=index, writes=index[None, :1],
        blocks=torch.ones(1, 1, 3, dtype=torch.int32),
    )  # fmt: skip
    cached = torch.ones(4, 16, 4, 128, dtype=dtype)
    for window, cap in ((None, None), (8, 30.0)):
        out, _ = attention.rope_attend(
            q, k, k, index.float(), index.float(), Cache(cached, cached), step,
            scale=1, window=window, cap=cap, group=0, pdl=pdl,
        )  # fmt: skip
        assert out.shape == q.shape
    assert len(launched) == 6
    assert all(f"-DPDL={int(pdl)}" in options for options in launched)


def test_chips_without_room_for_a_large_cluster_have_a_smaller_one(
    launched: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"D": 64, "GROUP": 3, "SIZE": 16, "THREADS": 128, "BFLOAT16": 1,
               "WINDOWED": 0, "CAPPED": 0, "WIDE_POSITIONS": 0, "WIDE_TABLE": 0,
               "WIDE_WRITES": 0, "WIDE_COUNTS": 0, "PDL": 1}  # fmt: skip
    place = torch.device("cuda", 0)
    assert attention.kernel_of(options, place)[1] == 16
    monkeypatch.setattr(Launched, "has_room", False)
    assert attention.kernel_of(options, place)[1] == 8
    assert "-DRANKS=8" in launched[-1]


def test_products_take_one_row_in_half_precision() -> None:
    row = torch.empty(1, 512, dtype=torch.bfloat16)
    assert PRODUCTS.takes(row, float8(64, 512))
    assert PRODUCTS.takes(row.half(), int4(64, 512))
    assert not PRODUCTS.takes(row.float(), float8(64, 512))
    assert not PRODUCTS.takes(row.expand(2, -1), float8(64, 512))
    assert not PRODUCTS.takes(row, int4(64, 512, 32))
    assert not PRODUCTS.takes(row, Plain(torch.empty(64, 512)))


@pytest.mark.parametrize("make", [float8, int4])
def test_products_fit_shared_memory_or_are_refused(make: Any) -> None:
    taken = set()
    for n, k in product((16, 4096, 28672, 262144, 1 << 20), (256, 4096, 1 << 15)):
        if n * k > 1 << 31:
            continue
        w = make(n, k)
        shape = PRODUCTS._shape(is_int4=make is int4)
        fits = PRODUCTS.takes(torch.empty(1, k).half(), w)
        sizes = PRODUCTS._sizes(n, n, k, shape, is_int4=make is int4)
        assert fits == (sizes.depth > 0)
        assert not fits or sizes.shared <= 227 << 10
        taken.add(fits)
    assert taken == {True, False}
    assert not PRODUCTS.takes(torch.empty(1, 1 << 16).half(), make(16, 1 << 16))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "size", "taken"),
    [
        (32, 8, 128, 16, True),
        (9, 3, 64, 32, True),
        (32, 2, 128, 16, False),
        (16, 1, 128, 16, False),
        (32, 8, 256, 16, False),
        (32, 8, 96, 16, False),
        (32, 8, 128, 8, False),
    ],
)
def test_attention_takes_heads_that_registers_hold(
    heads: int, kv_heads: int, d: int, size: int, taken: bool
) -> None:
    q = torch.empty(1, heads, d, dtype=torch.bfloat16)
    k = torch.empty(2, size, kv_heads, d, dtype=torch.bfloat16)
    step = SimpleNamespace(lengths=torch.ones(1))

    def takes(q: torch.Tensor, cache: Cache) -> bool:
        return not attention.refuse(q, q, q, q, q, cache, step)

    assert takes(q, Cache(k, k)) == taken
    assert not takes(q.expand(2, -1, -1), Cache(k, k))
    assert not takes(q.float(), Cache(k.float(), k.float()))
    assert not takes(q, Cache(k.view(torch.uint8), k.view(torch.uint8)))

"""Steps of one row use the kernels of a chip, and all others those of Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inl.checkpoints.blocks.dtypes import packed_bytes
from inl.ops.linear import Linear
from inl.ops.mlp import GatedMlp
from inl.ops.norm import Norm
from inl.spec.op import CATALOG
from inl.spec.selection import KernelSelection, select_kernel
from inl.spec.strict_array import StrictArray
from inl_cuda.one_row import kernels
from inl_cuda.one_row.stored import OneRowFirst
from inl_torch.eager.mlp import StackedMlp
from inl_torch.triton.float8 import products as float8
from inl_torch.triton.int4 import products as int4
from inl_torch.triton.matmul.stored import Plain
from inl_torch.triton.matmul.stored_kernels import MatrixSize
from inl_torch.triton.tuning import Tuning

EPS = 1e-5


class Other(Plain):
    """A matrix that kernels of one row do not take."""


class Exact:
    """Products of plain matrices in float64, which count their calls."""

    tuning = Tuning(pdl=True)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def takes(self, x: torch.Tensor, w: Any) -> bool:
        return len(x) == 1 and not isinstance(w, Other)

    def multiply(
        self, x: Any, w: Any, bias: Any, *, gated: str = "", pdl: bool = True
    ) -> Any:
        assert pdl == self.tuning.uses_pdl(1)
        self.calls.append(gated)
        y = x @ w.weight.T + (0 if bias is None else bias)
        if gated:
            gate, up = y.chunk(2, 1)
            y = torch.nn.functional.silu(gate) * up
        return y

    def norm_multiply(
        self, residual: Any, delta: Any, norm: Any, eps: float, w: Any, bias: Any, *,
        gated: str = "", pdl: bool = True,
    ) -> Any:  # fmt: skip
        total = residual + delta
        normed = total * (total.pow(2).mean(1, keepdim=True) + eps).rsqrt()
        return total, self.multiply(normed * norm.weight, w, bias, gated=gated, pdl=pdl)

    def product(self, x: Any, w: Any, bias: Any) -> Any:
        return self.multiply(x, w, bias)

    def norm_product(self, *args: Any) -> Any:
        return self.norm_multiply(*args)

    def mlp(self, x: Any, w: StackedMlp, activation: str) -> Any:
        inner = self.multiply(x, w.gate_up, None, gated=activation)
        return self.multiply(inner, w.down, None)

    def norm_mlp(
        self, residual: Any, delta: Any, norm: Any, eps: float, w: Any, activation: str
    ) -> Any:
        gate_up = w.gate_up, None
        total, inner = self.norm_multiply(
            residual, delta, norm, eps, *gate_up, gated=activation
        )
        return total, self.multiply(inner, w.down, None)

    def refuse_norm(self, residual: Any, _: Any) -> str | None:
        return f"{len(residual)} rows"


def matrix(n: int, k: int, kind: type[Plain] = Plain) -> Plain:
    return kind(torch.randn(n, k, dtype=torch.float64))


def both(x: Any, run: Any) -> tuple[Any, Any, OneRowFirst]:
    """Results of the products that prefer those of one row, and of others alone."""
    first = OneRowFirst(Exact(), Exact(), is_int4=False, pdl=True)
    return run(first, x), run(Exact(), x), first


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", [Plain, Other])
def test_products_of_one_row_are_computed_apart(rows: int, kind: type[Plain]) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, rows, 8, dtype=torch.float64)
    gain = Norm(torch.rand(8, dtype=torch.float64))
    w, bias = matrix(6, 8, kind), torch.randn(6, dtype=torch.float64)
    mlp = StackedMlp(matrix(10, 8, kind), matrix(8, 5))
    runs = [
        lambda p, x: p.product(x[0], w, bias),
        lambda p, x: p.norm_product(x[0], x[1], gain, EPS, w, bias),
        lambda p, x: p.mlp(x[0], mlp, "silu"),
        lambda p, x: p.norm_mlp(x[0], x[1], gain, EPS, mlp, "silu"),
    ]
    for number, run in enumerate(runs):
        got, right, first = both(x, run)
        for one, other in zip(got, right, strict=True):
            assert torch.allclose(one, other)
        apart, others = first.one_row.calls, first.products.calls
        if rows > 1 or kind is Other:
            # The products of several rows compute their feed-forward layer themselves.
            assert not apart
        else:
            assert apart == ([""] if number < 2 else ["silu", ""])
            assert not others
    assert first.refuse_norm(x[0], MatrixSize(6, 8)) == f"{rows} rows"


TUNING = Tuning(pdl=True)
SELECTION = {
    "int4": KernelSelection(
        (*int4.int4_kernels(TUNING), *kernels.int4_kernels(TUNING))
    ),
    "float8": KernelSelection(
        (*float8.float8_kernels(TUNING), *kernels.float8_kernels(TUNING))
    ),
}
LAYOUTS = {"int4": "int4_chunks", "float8": "float8_rows"}


def traced(kind: str, n: int, k: int, *, decoded: bool = False) -> StrictArray:
    size = packed_bytes((n, k), "q4_1" if kind == "int4" else "mxfp8")
    return StrictArray(
        (n, k), "bfloat16", layout=LAYOUTS[kind], stored_bytes=None if decoded else size
    )


def chosen(kind: str, op: str, *args: Any, **attrs: Any) -> str:
    choice = select_kernel(CATALOG[op], args, attrs, SELECTION[kind])
    assert choice.kernel is not None, choice.refusals
    return choice.kernel.name


@pytest.mark.parametrize(("rows", "dtype", "names"), [
    (1, "bfloat16", ("cuda", "cuda+triton")),
    (1, "float16", ("cuda", "cuda+triton")),
    (2, "bfloat16", ("triton", "triton")),
    (128, "float16", ("triton", "triton")),
    (129, "bfloat16", ("triton+eager", "triton+eager")),
    (1, "float32", ("eager", "triton+eager")),
])  # fmt: skip
def test_a_product_is_named_by_what_computes_it(
    rows: int, dtype: str, names: tuple[str, str]
) -> None:
    x = StrictArray((rows, 4096), dtype)
    for kind, name in zip(("float8", "int4"), names, strict=True):
        w = Linear(traced(kind, 4096, 4096))
        assert chosen(kind, "linear", x, w) == f"{name}_{kind}"
        shard = Linear(traced(kind, 4096, 4096, decoded=True))
        assert chosen(kind, "linear", x, shard) == f"eager_{kind}"


@pytest.mark.parametrize(("inner", "decoded", "rows", "names"), [
    (14336, False, 1, ("cuda", "cuda+triton")),
    (53248, False, 1, ("cuda+triton", "cuda+triton")),  # too wide for a program
    (14336, True, 1, ("cuda+eager", "cuda+triton+eager")),
    (14336, True, 7, ("triton+eager", "triton+eager")),
    (14336, False, 7, ("triton", "triton")),
    (14336, False, 500, ("triton+eager", "triton+eager")),
])  # fmt: skip
def test_a_layer_is_named_by_what_computes_its_products(
    inner: int, decoded: bool, rows: int, names: tuple[str, str]
) -> None:
    x = StrictArray((rows, 4096), "bfloat16")
    norm = Norm(StrictArray((4096,), "bfloat16"))
    for kind, name in zip(("float8", "int4"), names, strict=True):
        gate = traced(kind, inner, 4096)
        w = GatedMlp(gate, gate, traced(kind, 4096, inner, decoded=decoded))
        assert chosen(kind, "gated_mlp", x, w, activation="silu") == f"{name}_{kind}"
        if rows <= int4.MAX_STREAMED:
            attrs = {"eps": EPS, "activation": "silu"}
            assert chosen(kind, "norm_mlp", x, x, norm, w, **attrs) == f"{name}_{kind}"

"""Steps of one row use the kernels of a chip, and all others those of Triton."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inl.ops.norm import Norm
from inl.spec.cache import Cache
from inl_torch.eager.mlp import StackedMlp
from inl_torch.triton.attention import rope_attend
from inl_torch.triton.attention.row_splits import DecodeWork
from inl_torch.triton.float8.products import float8_kernels
from inl_torch.triton.int4.products import int4_kernels
from inl_torch.triton.matmul.one_row import OneRowFirst, one_row_first
from inl_torch.triton.matmul.stored import Plain
from inl_torch.triton.one_row import OneRowKernels
from inl_torch.triton.tuning import AttentionConfig, Tuning

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

    def refuse_norm(self, residual: Any) -> str | None:
        return f"{len(residual)} rows"


def matrix(n: int, k: int, kind: type[Plain] = Plain) -> Plain:
    return kind(torch.randn(n, k, dtype=torch.float64))


def both(x: Any, run: Any) -> tuple[Any, Any, OneRowFirst]:
    """Results of the products that prefer those of one row, and of others alone."""
    first = OneRowFirst(Exact(), Exact())
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
    assert first.refuse_norm(x[0]) == f"{rows} rows"


def test_a_chip_without_kernels_of_one_row_uses_triton() -> None:
    products = Exact()
    assert one_row_first(products) is products


@pytest.mark.parametrize("kernels", [float8_kernels, int4_kernels])
def test_kernels_of_weights_prefer_those_of_one_row(kernels: Any) -> None:
    one_row = OneRowKernels(Exact(), None)
    for kernel in kernels(Tuning(one_row=one_row)):
        assert isinstance(kernel.run.keywords["products"], OneRowFirst)
    for kernel in kernels(Tuning()):
        assert not isinstance(kernel.run.keywords["products"], OneRowFirst)


class Attention:
    def __init__(self, takes: bool) -> None:
        self._takes = takes

    def takes(self, q: Any, cache: Any) -> bool:
        return self._takes

    def attend(self, q: Any, k: Any, v: Any, *_: Any, **options: Any) -> Any:
        assert options == {"scale": 0.5, "window": None, "cap": None, "group": 0,
                           "pdl": False}  # fmt: skip
        return "attended"


class TritonKernel:
    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(self, *_: Any, **__: Any) -> None:
        self.launches += 1


def test_attention_of_one_row_is_that_of_the_chip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k = torch.randn(1, 4, 16), torch.randn(1, 2, 16)
    turn, index = torch.ones(1, 8), torch.ones(3, dtype=torch.int64)
    cached = torch.randn(4, 16, 2, 16)
    work = DecodeWork(index[:1], index[2:], 256)
    step = SimpleNamespace(
        positions=index[:1], used_counts=index, rows=index[:1] * 0, starts=index[:1],
        writes=index[None, :1] + 16, blocks=torch.ones(1, 1, 3, dtype=torch.int64),
        lengths=index[:1], plan={"attend_project/triton": work},
    )  # fmt: skip
    kernel = TritonKernel()
    monkeypatch.setattr(rope_attend, "rope_attend", kernel)

    def attended(tuning: Tuning) -> Any:
        return rope_attend.decode_attention(
            q, k, k, turn, turn, Cache(cached, cached), step, scale=0.5, window=None,
            cap=None, group=0, tuning=tuning,
        )  # fmt: skip

    own = Tuning(one_row=OneRowKernels(None, Attention(True)))
    assert attended(own) == "attended"
    assert not kernel.launches
    # A configuration of Triton's kernel that was measured to be faster is used.
    tuned = replace(own, attend=AttentionConfig(32, 2, 2, 2))
    other = Tuning(one_row=OneRowKernels(None, Attention(False)))
    for number, tuning in enumerate((Tuning(), other, tuned), 1):
        assert attended(tuning).shape == (1, 4, 16)
        assert kernel.launches == number

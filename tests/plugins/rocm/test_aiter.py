"""AITER's products, chosen by its table: with a stand-in for AITER on torch's CPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from inl.device import Device
from inl.ops.linear import Linear, QkvLinear
from inl.spec.op import CATALOG
from inl.spec.selection import KernelSelection, select_kernel
from inl_rocm import aiter_products
from inl_rocm import backend as backend_module
from inl_rocm.backend import RocmBackend
from inl_torch.eager.linear import StackedQkv

TABLE = {
    (2, 6, 8): {"libtype": "asm", "us": 3.1},
    (4, 6, 8): {"libtype": "hipblaslt", "us": 2.9},
    (3, 6, 8): {"libtype": "skinny", "solidx": 2},
}
"""(rows, outputs, inputs) -> an entry in AITER's form; the last one is a guess."""


@pytest.fixture
def library(monkeypatch):
    """A module in AITER's place, with the products that it computed."""
    fake, tuned = ModuleType("aiter"), ModuleType("aiter.tuned_gemm")
    fake.__path__, fake.__spec__ = [], SimpleNamespace()
    fake.computed = []

    def config(rows, outputs, inputs, bias, dtype, otype):
        assert bias is False
        assert dtype == otype == "torch.bfloat16"
        return TABLE.get((rows, outputs, inputs), {"libtype": "torch", "solidx": 0})

    def mm(x, weight, bias=None, otype=None):
        fake.computed.append((*x.shape, weight.shape[0]))
        y = x.double() @ weight.double().T
        return (y if bias is None else y + bias.double()).to(otype)

    tuned.get_GEMM_A16W16_config = config
    tuned.tgemm = SimpleNamespace(mm=mm)
    monkeypatch.setitem(sys.modules, "aiter", fake)
    monkeypatch.setitem(sys.modules, "aiter.tuned_gemm", tuned)
    return fake


@pytest.fixture(autouse=True)
def fresh():
    aiter_products.module.cache_clear()
    yield
    aiter_products.module.cache_clear()


@pytest.fixture
def kernels(monkeypatch):
    """A function that returns the kernels of a backend on an unlisted chip."""
    monkeypatch.setattr(backend_module, "architecture", lambda _place: "gfx1010")

    def registered():
        backend = object.__new__(RocmBackend)
        backend.device, backend.place = Device("rocm:0"), torch.device("cuda", 0)
        return tuple(backend.kernels())

    return registered


def operands(rows, dtype=torch.bfloat16):
    rng = np.random.default_rng(rows)
    x, weight = (
        torch.from_numpy(rng.standard_normal(shape)).to(dtype)
        for shape in ((rows, 8), (6, 8))
    )
    return x, Linear(weight)


def chosen(kernels, x, w):
    return select_kernel(CATALOG["linear"], (x, w), {}, KernelSelection(kernels))


def test_a_product_that_the_table_lists_is_aiters(library, kernels):
    x, w = operands(2)
    kernel = chosen(kernels(), x, w).kernel
    assert kernel.label == "linear/aiter"
    want = x.double() @ w.weight.double().T
    torch.testing.assert_close(kernel.run(x, w).double(), want, rtol=2**-8, atol=0)
    assert library.computed == [(2, 8, 6)]


@pytest.mark.parametrize(
    ("rows", "dtype", "reason"),
    [
        (4, torch.bfloat16, "hipblaslt is faster by AITER's table"),
        (3, torch.bfloat16, "no product of 3 x 8 x 6 in AITER's table"),
        (5, torch.bfloat16, "no product of 5 x 8 x 6 in AITER's table"),
        (2, torch.float32, "takes bfloat16 and float16, found float32"),
    ],
)
def test_other_products_are_torchs(library, kernels, rows, dtype, reason):
    choice = chosen(kernels(), *operands(rows, dtype))
    assert choice.kernel.label == "linear/eager"
    assert ("linear/aiter", reason) in choice.refusals
    assert library.computed == []


def test_stacked_projections_are_one_product(library, kernels):
    x, w = operands(2)
    (kernel,) = [each for each in kernels() if each.label == "qkv_linear/aiter"]
    assert kernel.refuse(x, QkvLinear(w.weight[:2], w.weight[:2], w.weight[:2])) is None
    parts = kernel.run(x, StackedQkv(w.weight, w.weight[2:4]))
    assert [part.shape[1] for part in parts] == [2, 2, 2]
    assert library.computed == [(2, 8, 6)]


def test_without_aiter_there_is_no_such_kernel(kernels):
    assert aiter_products.module() is None
    assert not [each for each in kernels() if each.name == "aiter"]


def test_an_aiter_that_does_not_import_is_left_out(
    library, kernels, monkeypatch, caplog
):
    monkeypatch.setitem(sys.modules, "aiter.tuned_gemm", None)
    assert not [each for each in kernels() if each.name == "aiter"]
    assert "aiter is not used: ModuleNotFoundError" in caplog.text

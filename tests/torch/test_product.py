"""The ops of rounded products and of stored weights, against float64."""

from __future__ import annotations

import pytest
import torch

from inl_torch.quantized_linear import QuantizedLinear
from inl_torch.registered.product import rounded_product
from inl_torch.registered.quantized import quantized_linear

UNITS = {"float16": 2**-11, "bfloat16": 2**-8, "float8_e4m3fn": 2**-4}
"""Half units of the last place of a number."""


def operands(*lead):
    torch.manual_seed(3)
    a = torch.randn(3, 5, 16, requires_grad=True)
    return a, torch.randn(*lead, 16, 7, requires_grad=True)


def is_close(found, exact, size, unit):
    return bool(((found.double() - exact).abs() <= unit * size + 1e-6).all())


@pytest.mark.parametrize("lead", [(), (3,), (1,)], ids=str)
@pytest.mark.parametrize("inputs", UNITS)
def test_products_and_their_derivatives(inputs, lead):
    a, b = operands(*lead)
    y, wide = rounded_product(a, b, inputs), [x.detach().double() for x in (a, b)]
    for each in wide:
        each.requires_grad_()
    x, z = wide
    # Of float8, numbers below the normal ones of its largest number are as far apart.
    unit = 2.1 * UNITS[inputs]
    assert is_close(y, x @ z, x.abs() @ z.abs(), unit)
    assert not is_close(y, x @ z, x.abs() @ z.abs(), unit / 500)
    weights = torch.randn(3, 5, 7)
    found = torch.autograd.grad(y, (a, b), weights)
    exact = torch.autograd.grad(x @ z, (x, z), weights.double())
    sizes = torch.autograd.grad(x.abs() @ z.abs(), (x, z), weights.double().abs())
    half = 2.1 * UNITS["bfloat16" if "8" in inputs[5:7] else inputs]
    for each, true, size in zip(found, exact, sizes, strict=True):
        assert is_close(each, true, size.abs(), half)


def test_the_ops_keep_the_rules_of_torch():
    a, b = operands()
    torch.library.opcheck(rounded_product, (a, b, "float16"))
    layer = QuantizedLinear(torch.nn.Linear(16, 7), "int8")
    given = a, layer.packed, layer.scale, layer.bias
    torch.library.opcheck(quantized_linear, given)
    (gradient,) = torch.autograd.grad(layer(a).sum(), a)
    exact = layer.weight(torch.float64).sum(0).expand(a.shape)
    assert torch.allclose(gradient.double(), exact, atol=1e-5)


def test_batched_products_have_a_scale_each():
    a, b = (each.detach() for each in operands())
    a = a * torch.tensor([1.0, 1e3, 1e-3])[:, None, None]
    found = torch.vmap(lambda x: rounded_product(x, b, "float8_e4m3fn"))(a)
    alone = [rounded_product(each, b, "float8_e4m3fn") for each in a]
    assert torch.equal(found, torch.stack(alone))

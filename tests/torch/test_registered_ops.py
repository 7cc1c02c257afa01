"""Ops registered with ``torch.library``: opcheck, derivatives, vmap."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from inl_torch.quantized_linear import pack
from inl_torch.registered import group_products, grouped
from inl_torch.registered.dynamics import dynamics, dynamics_backward
from inl_torch.registered.product import rounded_product
from inl_torch.registered.quantized import quantized_linear

INL = torch.ops.inl
CLAMPS = 1.2, 1.5
"""Maximum of beta and of the velocity's magnitude; both are active below."""


def new(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype)


def operands(controlled, shape=(2, 4, 3), dtype=torch.float64):
    """Operands of the op ``dynamics`` that broadcast in different ways."""
    torch.manual_seed(0)
    width = shape[-1]
    make = partial(new, dtype=dtype)
    coefs = [make(4, 3 * width), None, None]
    if not controlled:
        coefs = [make(width), make(4, 1), make(*shape)]
    dt = torch.tensor(0.3, dtype=dtype)
    return [make(*shape), make(*shape), make(width), *coefs, dt]


def clamps(controlled):
    return CLAMPS if controlled else (None, 1.5)


def each_needing(tensors):
    """Copies, each with a gradient."""
    copies = [None if x is None else x.detach().clone() for x in tensors]
    return [x if x is None else x.requires_grad_(x.is_floating_point()) for x in copies]


def sorted_groups(dtype=torch.float64):
    """Rows [6, 4], sizes of 3 groups, one of them empty, and matrices [3, 5, 4]."""
    torch.manual_seed(1)
    return new(6, 4, dtype=dtype), torch.tensor([4, 0, 2]), new(3, 5, 4, dtype=dtype)


def permutation(size=6):
    order = torch.tensor([3, 1, 5, 0, 2, 4])[:size]
    return order, order.argsort()


def cases(dtype):
    """Arguments of every op: (op, arguments)."""
    for controlled, steps in ((False, 3), (True, 1)):
        given, attrs = operands(controlled, dtype=dtype), (steps, *clamps(controlled))
        yield INL.dynamics.default, (*given, *attrs)
        count = sum(each is not None for each in given)
        needed = [index != 1 for index in range(count)]
        g = new(2, 4, 3, dtype=dtype), new(2, 4, 3, dtype=dtype)
        yield INL.dynamics_backward.default, (*g, *given, *attrs, needed)
    rows, sizes, weight = sorted_groups(dtype)
    yield INL.dispatch_rows.default, (rows[:3], *permutation(), 2)
    yield INL.collect_rows.default, (rows, *permutation(), 2)
    yield INL.grouped_linear.default, (rows, sizes, weight, False)
    yield INL.grouped_linear.default, (rows, sizes, weight.mT.contiguous(), True)
    yield INL.grouped_outer.default, (rows, new(6, 2, dtype=dtype), sizes)
    a, b = new(3, 8, dtype=dtype), new(8, 4, dtype=dtype)
    yield rounded_product, (a, b, "bfloat16")
    packed, scale = pack(new(4, 32), "int8")
    yield quantized_linear, (new(3, 32, dtype=dtype), packed, scale, None)


COMPILED = "test_aot_dispatch_dynamic"
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", COMPILED)


@pytest.mark.parametrize(
    ("dtype", "needing", "checks"),
    [
        (torch.float64, True, CHECKS),
        (torch.float32, False, CHECKS),
        (torch.float32, True, CHECKS[:3]),
        (torch.bfloat16, True, CHECKS[:3]),
    ],
    ids=["float64 gradients", "float32", "float32 gradients", "bfloat16 gradients"],
)
def test_opcheck(dtype, needing, checks):
    checked = set()
    for op, args in cases(dtype):
        held = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args]
        for x in held if needing else ():
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.requires_grad_()
        torch.library.opcheck(op, tuple(held), test_utils=checks)
        checked.add(op.name())
    assert checked == {
        name for name in torch._C._dispatch_get_all_op_names() if name[:5] == "inl::"
    }


def test_opcheck_finds_a_wrong_shape():
    with torch.library._scoped_library("inl_test", "FRAGMENT") as library:
        library.define("wrong(Tensor x) -> Tensor")
        library.impl("wrong", lambda x: x.repeat(2), "CompositeExplicitAutograd")
        library._register_fake("wrong", lambda x: x.new_empty(x.shape))
        with pytest.raises(torch.testing._internal.optests.OpCheckError):
            torch.library.opcheck(torch.ops.inl_test.wrong.default, (new(3),))


@pytest.mark.parametrize("controlled", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_every_derivative_of_dynamics(controlled, steps):
    given = each_needing(operands(controlled, (2, 4, 2)))
    present = [x for x in given if x is not None]
    attrs = steps, *clamps(controlled)

    def call(*tensors):
        found = iter(tensors)
        args = [None if x is None else next(found) for x in given]
        x, v = dynamics(*args, *attrs)
        return x * x + v * v, x * v

    assert gradcheck(call, present)
    assert gradgradcheck(call, present)


def test_third_derivatives():
    given = [x.flatten()[:1] for x in operands(False, (1, 4, 3))]

    def at(point, order):
        def call(x):
            moved, v = dynamics(x, *given[1:], 2, None, None)
            return (moved**4 + v**3).sum()

        value = call(point)
        for _ in range(order):
            (value,) = torch.autograd.grad(value, point, create_graph=True)
        return value

    point, step = given[0].requires_grad_(), 1e-5
    found = at(point, 3)
    ends = [at((point + d).detach().requires_grad_(), 2) for d in (step, -step)]
    slope = (ends[0] - ends[1]) / (2 * step)
    assert found.abs() > 1e-3
    assert torch.allclose(found, slope, rtol=1e-5)


def test_every_derivative_of_grouped_products():
    rows, sizes, weight = sorted_groups()
    order, inverse = permutation()
    for transposed in (False, True):
        matrices = (weight.mT.contiguous() if transposed else weight).requires_grad_()

        def product(rows, matrices, transposed=transposed):
            y = INL.grouped_linear(rows, sizes, matrices, transposed)
            return y * y

        held = rows.clone().requires_grad_(), matrices.detach().requires_grad_()
        assert gradcheck(product, held)
        assert gradgradcheck(product, held)
    pair = each_needing([rows, new(6, 2)])
    assert gradgradcheck(lambda a, b: INL.grouped_outer(a, b, sizes) ** 2, pair)
    (x,) = each_needing([rows[:3]])
    assert gradgradcheck(lambda x: INL.dispatch_rows(x, order, inverse, 2) ** 2, (x,))
    (x,) = each_needing([rows])
    assert gradgradcheck(lambda x: INL.collect_rows(x, order, inverse, 2) ** 2, (x,))


def looped(op, dims, args):
    """Call an op per batch and stack the results."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=False) if d is not None)
    calls = [
        op(*(
            x if d is None else x.select(d, index)
            for x, d in zip(args, dims, strict=False)
        ), *args[len(dims):])
        for index in range(size)
    ]  # fmt: skip
    if isinstance(calls[0], torch.Tensor):
        return [torch.stack(calls)]
    return [torch.stack(parts) for parts in zip(*calls, strict=True)]


def mapped(op, dims, args):
    tensors, rest = args[: len(dims)], args[len(dims) :]
    run = torch.func.vmap(lambda *given: op(*given, *rest), in_dims=tuple(dims))
    found = run(*tensors)
    return [found] if isinstance(found, torch.Tensor) else list(found)


def stacked(x, dim):
    """Three variants of a tensor along an axis."""
    return torch.stack([x, x * 2, x * -0.5], dim)


ALL, SOME, OTHERS = (0, 0, 1, 1, 0, 0, 0), (0, None, None, 0, None, None, None), (
    None, 2, None, None, None, 1, 0,
)  # fmt: skip


@pytest.mark.parametrize("dims", [ALL, SOME, OTHERS], ids=["all", "some", "others"])
@pytest.mark.parametrize("backward", [False, True])
def test_vmap_of_dynamics_equals_a_loop(dims, backward):
    plain = operands(False)
    held = [x if d is None else stacked(x, d) for x, d in zip(plain, dims, strict=True)]
    op, attrs = dynamics, (2, None, 1.5)
    if backward:
        op, attrs = dynamics_backward, (*attrs, [True] * 7)
        held = [stacked(new(2, 4, 3), 1), new(2, 4, 3), *held]
        dims = (1, None, *dims)
    args = (*held, *attrs)
    for got, want in zip(mapped(op, dims, args), looped(op, dims, args), strict=True):
        assert got.shape == want.shape
        assert torch.allclose(got, want, atol=1e-12)


def test_vmap_of_grouped_ops_equals_a_loop():
    rows, _, weight = sorted_groups()
    sizes = torch.tensor([[4, 0, 2], [1, 2, 3], [0, 0, 6]])
    order = torch.stack([torch.randperm(6) for _ in range(3)])
    rows, weights = stacked(rows, 1), stacked(weight, 0)
    turns = (rows[:3], order, order.argsort(1), 2), (1, 0, 0)
    for op, args, dims in (
        (grouped.grouped_linear, (rows, sizes, weight, False), (1, 0, None)),
        (grouped.grouped_linear, (rows, sizes, weights, False), (1, 0, 0)),
        (
            grouped.grouped_linear,
            (rows[:, 0], sizes[0], weights, False),
            (None, None, 0),
        ),
        (grouped.grouped_outer, (rows, new(6, 2), sizes), (1, None, 0)),
        (grouped.dispatch_rows, *turns),
        (grouped.collect_rows, (rows, *turns[0][1:]), turns[1]),
    ):
        (got,), (want,) = mapped(op, dims, args), looped(op, dims, args)
        assert torch.allclose(got, want, atol=1e-12), op


def test_more_groups_than_matrices_equal_one_call_each():
    """Groups of the batches of a nested vmap share the matrices of their experts."""
    rows, _, weight = sorted_groups()
    sizes = torch.tensor([1, 2, 0, 0, 1, 2])
    found = torch.func.vmap(
        lambda w: INL.grouped_linear(rows, sizes, w, False)
    )(torch.stack([weight, 2 * weight]))  # fmt: skip
    halves = [
        INL.grouped_linear(part, each, weight, False)
        for part, each in ((rows[:3], sizes[:3]), (rows[3:], sizes[3:]))
    ]
    want = torch.cat(halves)
    assert torch.allclose(found, torch.stack([want, 2 * want]))
    held = each_needing([rows, weight])
    assert gradgradcheck(
        lambda rows, w: INL.grouped_linear(rows, sizes, w, False) ** 2, held
    )


@pytest.mark.parametrize("counts", [[4, 0, 2], [0, 0, 6], [1, 3, 2], [0, 1, 0, 0, 1]])
def test_blocks_without_read_sizes_equal_groups(counts):
    """What devices without a grouped product compute; also as bfloat16's product."""
    torch.manual_seed(2)
    sizes, total = torch.tensor(counts), sum(counts)
    rows, other = new(total, 4), new(total, 3)
    weight = new(len(counts), 5, 4)
    want = group_products.linear(rows, sizes, weight, False)
    found = group_products.linear_by_block(rows, sizes, weight.mT)
    assert torch.allclose(found, want)
    want = group_products.outer(rows, other, sizes)
    found = group_products.outer_by_block(rows, other, sizes)
    assert torch.allclose(found, want)


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"), reason="an older torch"
)
def test_the_grouped_product_of_torch_equals_groups():
    torch.manual_seed(3)
    half = partial(new, dtype=torch.bfloat16)
    sizes, rows, other, weight = torch.tensor([4, 0, 2]), half(6, 16), half(6, 8), None
    weight = half(3, 8, 16)
    assert not group_products.has_grouped_product(rows, weight)  # on the CPU
    want = group_products.linear(rows, sizes, weight, False)
    found = group_products.grouped_product(rows, weight.mT, sizes)
    assert torch.allclose(found, want, rtol=0.02, atol=0.05)
    want = group_products.outer(rows, other, sizes)
    found = group_products.grouped_product(rows.t(), other, sizes)
    assert torch.allclose(found, want, rtol=0.02, atol=0.05)

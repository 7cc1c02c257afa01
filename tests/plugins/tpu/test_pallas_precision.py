"""Products of float32 in Pallas kernels have float32 precision on a TPU.

The simulator computes in float32 whatever precision is asked for.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from inl.ops.moe import ExpertLinear
from inl.spec.step import Step
from inl_jax.pages import Pages
from inl_jax.pallas import (
    block_sparse,
    block_sparse_attention,
    experts,
    matmul,
    paged_attention,
)
from inl_jax.pallas.packed import Packed

HIGHEST = jax.lax.Precision.HIGHEST


def spec(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def packed(tokens, kind, rows):
    w = Packed(spec((rows, 512), kind), spec((32, 512), "int16"))
    return matmul.matmul, (spec((tokens, 1024)), w)


def attended(tokens):
    sizes = dict.fromkeys(("tokens", "positions", "rows"), tokens) | {"starts": 3}
    shapes = {name: (sizes.get(name, 2),) for name in Step._fields}
    shapes |= {"blocks": (1, 2, 8), "writes": (1, tokens), "used_counts": (3,)}
    step = Step(**{n: spec(s, "int32") for n, s in shapes.items() if n != "plan"})

    def run(q, pages, step):
        return paged_attention.attention(
            q, pages, step, scale=0.1, window=None, cap=None, group=0
        )

    return run, (spec((tokens, 8, 128)), Pages(spec((9, 2, 32, 256))), step)


def sparse():
    pairs = [(0, 0), (1, 1)]

    def run(x, values):
        return block_sparse.block_sparse_matmul(x, values, pairs, columns=256)

    return run, (spec((64, 256)), spec((2, 128, 128)))


def sparse_attention():
    def run(q, k, v):
        mask = np.tri(2, dtype=bool)
        return block_sparse_attention.block_sparse_attention(q, k, v, mask, causal=True)

    return run, (spec((2, 256, 128)),) * 3


def chosen():
    w = ExpertLinear(spec((4, 256, 128)))
    return experts.expert_linear, (spec((8, 1, 128)), spec((8, 2), "int32"), w)


CALLS = {
    "few rows of 8 bits": lambda: packed(8, "int8", 1024),
    "many rows of 8 bits": lambda: packed(512, "int8", 1024),
    "few rows of 4 bits": lambda: packed(8, "uint8", 512),
    "decoding": lambda: attended(2),
    "prompts": lambda: attended(512),
    "experts": chosen,
    "block-sparse product": sparse,
    "block-sparse attention": sparse_attention,
}


def products(jaxpr, inside=False):
    """Dtypes and precision of each product within a Pallas kernel."""
    for equation in jaxpr.eqns:
        if inside and equation.primitive.name == "dot_general":
            dtypes = {str(each.aval.dtype) for each in equation.invars}
            yield dtypes, equation.params["precision"]
        inner_kernel = inside or equation.primitive.name == "pallas_call"
        for inner in jaxprs_in_params(equation.params):
            yield from products(inner, inner_kernel)


def precisions(name):
    run, arguments = CALLS[name]()
    # JAX would not trace the same function again.
    jaxpr = jax.make_jaxpr(lambda *args: run(*args))(*arguments)
    found = list(products(jaxpr.jaxpr))
    assert all(dtypes == {"float32"} for dtypes, _ in found)
    return [precision for _, precision in found]


@pytest.mark.parametrize("name", CALLS)
def test_every_product_of_float32_is_precise(name):
    found = precisions(name)
    assert found
    assert set(found) <= {HIGHEST, (HIGHEST, HIGHEST)}


def test_a_product_of_less_precision_is_found(monkeypatch):
    def product(x, y):
        return jnp.dot(x, y, preferred_element_type=jnp.float32)

    monkeypatch.setattr(matmul, "product", product)
    assert HIGHEST not in precisions("few rows of 8 bits")

"""Adapters in Triton: several tiles of tokens, columns, outputs and splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_place import DTYPES, IS_SLOW, PLACE

from inl.ops import catalog
from inl.ops.linear import Linear, QkvLinear
from inl.ops.lora import GatedLora, Lora, QkvLora
from inl.spec.dispatch import DynamicOps
from inl.spec.op import Case
from inl.spec.tolerance import judge

# isort: split
from inl_torch import eager
from inl_torch import triton as ours
from inl_torch.eager.linear import StackedQkv
from inl_torch.triton.tuning import Tuning

OPS = DynamicOps((*ours.kernels(Tuning()), *eager.kernels()))
GROUPS = {"lora": (Lora, 1), "qkv_lora": (QkvLora, 3), "gated_lora": (GatedLora, 2)}
SIZES = {
    "lora": (34, 40, 1030, 9, 16),
    "qkv_lora": (3, 40, 70, 20, 12),
    "gated_lora": (34, 40, 70, 9, 16),
}
"""(tokens, outputs, inputs, adapters, rank): more than one tile of most."""


def case_of(name, size, chosen, rng):
    """A case in which each token selects a number of an adapter, or -1."""
    tokens, n, k, adapters, rank = size
    kind, count = GROUPS[name]
    columns = adapters * rank
    ys = rng.standard_normal((count, tokens, n))
    pairs = [
        matrix
        for _ in range(count)
        for matrix in (
            rng.standard_normal((columns, k)) / k**0.5,
            rng.standard_normal((n, columns)) / rank**0.5,
        )
    ]
    selected = (chosen[:, None] == np.arange(columns) // rank).astype(np.float64)
    attrs = {"rank": rank} | ({"activation": "silu"} if count == 2 else {})
    x = rng.standard_normal((tokens, k))
    return Case(str(size), (*ys, x, kind(*pairs), selected), attrs)


def random_case(name, rng):
    size = SIZES[name]
    return case_of(name, size, rng.integers(-1, size[3], size[0]), rng)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GROUPS)
def test_adapters_of_many_tiles(name, dtype, seed, on_torch, on_host):
    case = random_case(name, np.random.default_rng(seed))
    arguments = on_torch(catalog()[name], case, dtype, PLACE)
    got = on_host(getattr(OPS, name)(*arguments, **case.attrs))
    verdict = judge(catalog()[name], case, dtype, got)
    assert verdict.passed, f"{name} {dtype}, seed {seed}: {verdict}"


def outputs(name, results):
    """The results of an op as a tuple."""
    return results if name == "qkv_lora" else (results,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gated_lora"] if IS_SLOW else GROUPS)
def test_a_row_has_the_same_bits_in_any_batch(name, dtype, seed, on_torch):
    case = random_case(name, np.random.default_rng(seed))
    *rows, w, selected = on_torch(catalog()[name], case, dtype, PLACE)
    run = getattr(OPS, name)
    copies = [row.clone() for row in rows]  # an op may overwrite its outputs
    together = outputs(name, run(*copies, w, selected, **case.attrs))
    for count in (1, 3):
        *parts, chosen = (part[-count:].clone() for part in (*rows, selected))
        alone = outputs(name, run(*parts, w, chosen, **case.attrs))
        for many, few in zip(together, alone, strict=True):
            assert torch.equal(many[-count:], few), count


@pytest.mark.parametrize("name", ["gated_lora"] if IS_SLOW else GROUPS)
def test_adapters_that_no_token_selects_are_not_read(name, seed, on_torch):
    size, rng = SIZES[name], np.random.default_rng(seed)
    tokens, rank = size[0], size[4]
    chosen = np.where(np.arange(tokens) % 2, 3, -1)
    case = case_of(name, size, chosen, rng)
    *rows, w, selected = on_torch(catalog()[name], case, "float32", PLACE)
    run = getattr(OPS, name)
    copies = [row.clone() for row in rows]
    clean = run(*copies, w, selected, **case.attrs)
    spoiled = []
    for matrix in w:
        # A is [C, K] and B is [N, C].
        axis = 0 if matrix.shape[0] == selected.shape[1] else 1
        kept = torch.arange(matrix.shape[axis]) // rank == 3
        shape = [1, 1]
        shape[axis] = -1
        nans = torch.full_like(matrix, float("nan"))
        spoiled.append(torch.where(kept.view(shape).to(PLACE), matrix, nans))
    other = run(*rows, type(w)(*spoiled), selected, **case.attrs)
    pairs = zip(outputs(name, clean), outputs(name, other), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def adapted_results(results):
    """The results of an op with adapted layers as a tuple."""
    return results if isinstance(results, tuple) else (results,)


STREAMED = Tuning(max_outputs=64, max_streamed_rows=32)
ADAPTED = ("adapted_linear", "adapted_qkv_linear", "adapted_gate_up")


def adapted_case(name, rng):
    """20 tokens, two tiles of outputs, columns of B and splits, uneven inputs."""
    tokens, k, adapters, rank = 20, 1100, 9, 16
    sizes = {ADAPTED[0]: [72], ADAPTED[1]: [128, 64, 64], ADAPTED[2]: [72, 72]}[name]
    columns = adapters * rank
    bases = [rng.standard_normal((n, k)) / k**0.5 for n in sizes]
    pairs = [
        matrix
        for n in sizes
        for matrix in (
            rng.standard_normal((columns, k)) / k**0.5,
            rng.standard_normal((n, columns)) / rank**0.5,
        )
    ]
    chosen = rng.integers(-1, adapters, tokens)
    selected = (chosen[:, None] == np.arange(columns) // rank).astype(np.float64)
    x, attrs = rng.standard_normal((tokens, k)), {"rank": rank}
    if name == "adapted_gate_up":
        layers, attrs["activation"] = [*map(Linear, bases), GatedLora(*pairs)], "silu"
    elif name == "adapted_qkv_linear":
        biases = [rng.standard_normal(n) for n in sizes]
        layers = [QkvLinear(*bases, *biases), QkvLora(*pairs)]
    else:
        layers = [Linear(bases[0], rng.standard_normal(sizes[0])), Lora(*pairs)]
    return Case(name, (x, *layers, selected), attrs)


def adapted_kernel(name, case, dtype, on_torch):
    """The kernel of an op, and its arguments: input, layers and selected columns."""
    x, *layers, selected = on_torch(catalog()[name], case, dtype, PLACE)
    kernel = {each.op: each for each in ours.kernels(STREAMED)}[name]
    assert kernel.refuse(x, *layers, selected, **case.attrs) is None
    if name == "adapted_qkv_linear":
        w = layers[0]
        weight, bias = torch.cat(w[:3]), torch.cat(w[3:])
        layers[0] = StackedQkv(weight, weight[128:192], bias)
    return kernel, x, layers, selected


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("name", ADAPTED)
def test_products_with_adapters(name, dtype, seed, on_torch, on_host):
    case = adapted_case(name, np.random.default_rng(seed))
    kernel, x, layers, selected = adapted_kernel(name, case, dtype, on_torch)
    # The second call needs the counters of the first at 0.
    for _ in range(2 if name == ADAPTED[0] else 1):
        got = on_host(kernel.run(x, *layers, selected, **case.attrs))
        verdict = judge(catalog()[name], case, dtype, got)
        assert verdict.passed, f"{name} {dtype}, seed {seed}: {verdict}"


@pytest.mark.parametrize("name", ["adapted_gate_up"] if IS_SLOW else ADAPTED)
def test_products_of_a_row_have_the_same_bits_in_any_batch(name, seed, on_torch):
    case = adapted_case(name, np.random.default_rng(seed))
    kernel, x, layers, selected = adapted_kernel(name, case, "bfloat16", on_torch)
    together = kernel.run(x, *layers, selected, **case.attrs)
    for count in (2, 3):
        parts = x[-count:].clone(), *layers, selected[-count:].clone()
        alone = kernel.run(*parts, **case.attrs)
        pairs = zip(adapted_results(together), adapted_results(alone), strict=True)
        assert all(torch.equal(many[-count:], few) for many, few in pairs), count


def test_products_read_the_selected_adapters_only(seed, on_torch):
    case, rank = adapted_case(ADAPTED[0], np.random.default_rng(seed)), 16
    kernel, x, layers, selected = adapted_kernel(ADAPTED[0], case, "bfloat16", on_torch)
    w, (a, b) = layers
    unused = torch.arange(a.shape[0], device=a.device) // rank == 1
    selected = torch.where(unused, 0, selected)
    clean = kernel.run(x, w, Lora(a, b), selected, **case.attrs)
    nan = float("nan")
    loras = Lora(torch.where(unused[:, None], nan, a), torch.where(unused, nan, b))
    assert torch.equal(clean, kernel.run(x, w, loras, selected, **case.attrs))
    none = torch.zeros_like(selected)
    base = kernel.run(x, w, Lora(a * nan, b * nan), none, **case.attrs)
    assert torch.equal(base[~selected.any(1)], clean[~selected.any(1)])
    assert not base.isnan().any()

"""Adapters in Triton: several tiles of tokens, columns, outputs and splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_place import DTYPES, PLACE

from inl.ops import catalog
from inl.ops.lora import GatedLora, Lora, QkvLora
from inl.spec.dispatch import DynamicOps
from inl.spec.op import Case
from inl.spec.tolerance import judge

# isort: split
from inl_torch import eager
from inl_torch import triton as ours
from inl_torch.triton.tuning import Tuning

OPS = DynamicOps((*ours.kernels(Tuning()), *eager.kernels()))
GROUPS = {"lora": (Lora, 1), "qkv_lora": (QkvLora, 3), "gated_lora": (GatedLora, 2)}
SIZES = ((40, 80, 1100, 9, 16), (3, 50, 2100, 20, 12))
"""(tokens, outputs, inputs, adapters, rank): more than one tile of each."""


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


def random_case(name, size, rng):
    return case_of(name, size, rng.integers(-1, size[3], size[0]), rng)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_adapters_of_many_tiles(name, size, dtype, seed, on_torch, on_host):
    case = random_case(name, size, np.random.default_rng(seed))
    arguments = on_torch(catalog()[name], case, dtype, PLACE)
    got = on_host(getattr(OPS, name)(*arguments, **case.attrs))
    verdict = judge(catalog()[name], case, dtype, got)
    assert verdict.passed, f"{name} {dtype}, seed {seed}: {verdict}"


def outputs(name, results):
    """The results of an op as a tuple."""
    return results if name == "qkv_lora" else (results,)


if PLACE == "cuda":  # In the interpreter NumPy's products depend on the batch.

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("name", GROUPS)
    def test_a_row_has_the_same_bits_in_any_batch(name, dtype, seed, on_torch):
        case = random_case(name, SIZES[0], np.random.default_rng(seed))
        *rows, w, selected = on_torch(catalog()[name], case, dtype, PLACE)
        run = getattr(OPS, name)
        copies = [row.clone() for row in rows]  # an op may overwrite its outputs
        together = outputs(name, run(*copies, w, selected, **case.attrs))
        for count in (1, 17):
            *parts, chosen = (part[-count:].clone() for part in (*rows, selected))
            alone = outputs(name, run(*parts, w, chosen, **case.attrs))
            for many, few in zip(together, alone, strict=True):
                assert torch.equal(many[-count:], few), count


@pytest.mark.parametrize("name", GROUPS)
def test_adapters_that_no_token_selects_are_not_read(name, seed, on_torch):
    size, rng = SIZES[0], np.random.default_rng(seed)
    tokens, rank = size[0], size[4]
    chosen = np.where(np.arange(tokens) % 2, 3, -1)
    case = case_of(name, size, chosen, rng)
    *rows, w, selected = on_torch(catalog()[name], case, "float32", PLACE)
    run = getattr(OPS, name)
    clean = run(*rows, w, selected, **case.attrs)
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

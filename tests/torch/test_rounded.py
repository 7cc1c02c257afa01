"""Rounding by arithmetic on bits, which torch's compiler keeps, against casts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from inl_toolkit.kernels.precision import _rounded_bits

ROOT = Path(__file__).parents[2]
EDGES = (65519.9, 65520.0, 65504.0, 6e-8, 2.98e-8, 3e-8, 2.0**-14, 2.0**-14 * 0.99999,
         0.0, 3.4e38, torch.inf, torch.nan)  # fmt: skip


SOURCES = ("libs/inl-torch/src", "libs/inl-toolkit/src")
CASTS = {"to", "float", "half", "bfloat16", "double", "type"}


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_bits_equal_casts(dtype, wide, seed):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-40, 20, (100_000,), generator=generator)
    x = torch.randn(100_000, generator=generator) * torch.exp2(exponents.float())
    edges = torch.tensor(EDGES)
    x = torch.cat([x, edges, -edges]).to(getattr(torch, wide))
    if dtype == "float8_e4m3fn":
        x = x.clamp(-448, 448)
    exact = x.to(getattr(torch, dtype)).to(x.dtype)
    found = _rounded_bits(x, dtype, torch)
    torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit() | found.isnan(), exact.signbit() | exact.isnan())


def cast_of(node):
    """The tensor that a call converts, or None."""
    is_cast = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.value if is_cast and node.func.attr in CASTS else None


def test_pairs_of_conversions_stand_in_one_place():
    """torch's compiler may drop them; ``rounded`` has arithmetic for it."""
    found, files = [], 0
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "triton" in path.parts:
                continue  # compiled by Triton, which keeps them
            files += 1
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if cast_of(cast_of(node)) is not None:
                    found.append(path.relative_to(ROOT).as_posix())
    assert files > 50
    assert found == ["libs/inl-toolkit/src/inl_toolkit/kernels/precision.py"]

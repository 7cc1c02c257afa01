"""Rounding by arithmetic on bits, which torch's compiler keeps, against casts."""

from __future__ import annotations

import pytest
import torch

from inl.kernels.precision import _rounded_bits

EDGES = (65519.9, 65520.0, 65504.0, 6e-8, 2.98e-8, 3e-8, 2.0**-14, 2.0**-14 * 0.99999,
         0.0, 3.4e38, torch.inf, torch.nan)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bits_equal_casts(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-40, 20, (100_000,), generator=generator)
    x = torch.randn(100_000, generator=generator) * torch.exp2(exponents.float())
    edges = torch.tensor(EDGES)
    x = torch.cat([x, edges, -edges])
    exact = x.to(getattr(torch, dtype)).float()
    found = _rounded_bits(x, dtype, torch)
    torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit() | found.isnan(), exact.signbit() | exact.isnan())

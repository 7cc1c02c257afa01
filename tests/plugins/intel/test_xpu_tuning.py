"""Warps of the Triton kernels on Intel GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from inl_torch.triton.common import MAX_WARPS, spread


def on(kind):
    return SimpleNamespace(device=SimpleNamespace(type=kind))


@pytest.mark.parametrize(
    ("count", "kind", "found"),
    [(4, "cuda", 4), (4, "cpu", 4), (1, "xpu", 4), (4, "xpu", 16), (16, "xpu", 32)],
)
def test_warps_have_the_registers_of_those_on_nvidia(count, kind, found):
    """An Intel GPU's warp has 8 KiB of registers, NVIDIA's 32 KiB."""
    assert spread(count, on(kind)) == found <= MAX_WARPS

"""Launches of blocks of mixtures of experts, which bench/moe_launches.py counts."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
moe_launches = pytest.importorskip("moe_launches")

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="counts compiled kernels"
)

MOST = {
    "Qwen3-30B-A3B, 8 of 128": (5, 7),
    "Qwen1.5-MoE, 4 of 60 and a shared one": (12, 14),
    "DeepSeek-V3, 8 of 256 in groups and a shared one": (11, 13),
    "GPT-OSS 20B, 4 of 32": (20, 23),
}
"""Launches without and with sorting."""


@pytest.mark.parametrize("name", MOST)
def test_no_more_launches(name):
    few, many = (moe_launches.launches(name, rows) for rows in (1, 2048))
    assert (few.total(), many.total()) == MOST[name]
    for counts in (few, many):
        assert not {"sort", "argsort", "scatter_add_", "gather"} & set(counts)
        assert counts["route_row"] + counts["group_route_row"] == 1
    sorted_products = 3 if "GPT-OSS" in name else 1
    assert (few["place_slots"], many["place_slots"]) == (0, sorted_products)

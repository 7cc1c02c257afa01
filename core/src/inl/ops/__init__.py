"""The op catalog: one file per family, with bodies, shapes, costs and test cases."""

from __future__ import annotations

from collections.abc import Mapping

from inl.ops import (  # noqa: F401
    attention,
    cache,
    collective,
    embedding,
    fused,
    inl,
    linear,
    mlp,
    moe,
    moe_dispatch,
    mu,
    norm,
    prune_last_layer,
    rope,
    routed,
    sample,
    slots,
    step,
)
from inl.spec.op import CATALOG, OpSpec


def catalog() -> Mapping[str, OpSpec]:
    """Return every op by name."""
    return CATALOG

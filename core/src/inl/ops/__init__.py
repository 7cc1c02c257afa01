"""The catalog of ops. One file a family: body, shapes, cost and cases."""

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
    """Every op by name."""
    return CATALOG

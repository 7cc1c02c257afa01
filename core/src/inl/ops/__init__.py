"""The op catalog: one file per family, with bodies, shapes, costs and test cases."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from inl.ops import (  # noqa: F401
    activation,
    adapted,
    attention,
    cache,
    chunks,
    collective,
    draft_state,
    embedding,
    expert_places,
    full_attention,
    fused,
    group_route,
    heads,
    inl,
    linear,
    lora,
    mlp,
    moe,
    moe_dispatch,
    mu,
    norm,
    pool,
    prune_last_layer,
    recurrent,
    rope,
    routed,
    sample,
    sink_attention,
    slots,
    span_attention,
    sparse_attention,
    ssm,
    step,
    verify,
    xielu,
)
from inl.spec.op import CATALOG, OpSpec


def unknown_op(name: object) -> str:
    """Return a sentence about an op that is not in the catalog, with a suggestion."""
    known = sorted(CATALOG)
    close = get_close_matches(str(name), known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"there is no op {name!r:.80}; {hint}known: {', '.join(known)}"


def catalog() -> Mapping[str, OpSpec]:
    """Return every op by name."""
    return CATALOG

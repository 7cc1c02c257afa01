"""Ops as functions over an array namespace, for backends that trace programs.

Each function takes the namespace ``xp`` first: a module with functions of arrays, or of
values of a graph, that have the names and parameters of ``inl_onnx.functions``. Arrays
have static shapes, operators but ``==``, slices, ``reshape`` and ``astype(name)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from inl.backend.traced import moe, sample, step, verify

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    step.make_step, step.prune_last_layer, step.chunk_rows, step.admit,
    step.set_token_bias, sample.sample, sample.score, sample.mask_logits,
    verify.accepted_rows, verify.expand_rows, verify.own_slots, verify.verify,
    moe.route, moe.group_route, moe.expert_linear,
    moe.combine_experts, moe.drop_overflow, moe.load_balance_loss,
    moe.token_routed_mlp,
)  # fmt: skip
"""Every function; its name is that of its op."""


def bound(xp: Any) -> Iterator[Callable[..., Any]]:
    """Yield the functions over a namespace; each has the name of its op."""
    for function in FUNCTIONS:
        run = partial(function, xp)
        run.__name__ = function.__name__  # type: ignore[attr-defined]
        yield run

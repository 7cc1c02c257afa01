"""Hidden states of named layers of a step, for a draft head that reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from inl.errors import RequestError
from inl.models import sparse_mla
from inl.models.blocks import Carry, LocalCarry

if TYPE_CHECKING:
    from inl.ops.protocol import Ops
    from inl.spec.model import Model
    from inl.spec.step import Array


def with_taps(
    ops: Ops, model: Model, config: Any, weights: Any, *args: Any,
    body: Callable[..., Any], taps: tuple[int, ...], **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute a body of a step; returns the hidden states before the state.

    taps: indices of layers, ascending. The hidden states are the inputs of these
    layers, [T, len(taps) * H]; the number of layers stands for the last one's output.
    body: see :data:`inl.executor.model_step.BODIES`.
    """
    from inl.models.draft_module import join_columns

    seen: list[Array] = []
    model = _tapped(model, taps, seen, config.layers)
    *results, state = body(ops, model, config, weights, *args, **options)
    joined = seen[0]
    for each in seen[1:]:
        joined = join_columns(ops, joined, each)
    return (*results, joined, state)


def _tapped(
    model: Model, taps: tuple[int, ...], seen: list[Array], layers: int
) -> Model:
    """Return the model; its layers append the hidden states of the taps."""

    def layer(
        ops: Ops, config: Any, w: Any, carry: Any, *args: Any, **options: Any
    ) -> Any:
        index = options["index"]
        if index in taps:
            seen.append(_hidden(carry))
        carry, state = model.layer(ops, config, w, carry, *args, **options)
        if index + 1 == layers in taps:
            seen.append(_hidden(carry))
        return carry, state

    # ``prunes_last_layer`` reads the signature: a last layer whose output is read
    # computes all tokens.
    return replace(model, layer=layer if layers in taps else wraps(model.layer)(layer))


def _hidden(carry: Any) -> Array:
    if not isinstance(carry, Carry | LocalCarry | sparse_mla.Carry):
        raise RequestError(
            f"EngineConfig.speculation: found a draft head, but the layers of this "
            f"model pass {type(carry).__name__} on, not a hidden state and its last "
            "change; accepted: None, ngram or model"
        )
    return carry.residual + carry.delta

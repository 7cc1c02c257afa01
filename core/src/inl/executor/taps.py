"""Hidden states of named layers of a step, for a draft head that reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from inl.errors import RequestError
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
    layers, [T, len(taps) * H]. body: see :data:`inl.executor.model_step.BODIES`.
    """
    from inl.models.eagle3 import join_columns

    seen: list[Array] = []
    model = _tapped(model, taps, seen)
    *results, state = body(ops, model, config, weights, *args, **options)
    joined = seen[0]
    for each in seen[1:]:
        joined = join_columns(ops, joined, each)
    return (*results, joined, state)


def _tapped(model: Model, taps: tuple[int, ...], seen: list[Array]) -> Model:
    """Return the model; its layers append the hidden states that they receive."""

    @wraps(model.layer)
    def layer(
        ops: Ops, config: Any, w: Any, carry: Any, *args: Any, **options: Any
    ) -> Any:
        if options["index"] in taps:
            if not isinstance(carry, Carry | LocalCarry):
                raise RequestError(
                    f"EngineConfig.speculation: found 'eagle', but the layers of this "
                    f"model pass {type(carry).__name__} on, not a hidden state and "
                    "its last change; accepted: None, ngram or model"
                )
            seen.append(carry.residual + carry.delta)
        return model.layer(ops, config, w, carry, *args, **options)

    # ``prunes_last_layer`` reads the signature, which ``wraps`` keeps.
    return replace(model, layer=layer)

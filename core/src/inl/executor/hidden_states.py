"""Hidden states in place of logits: a model that ends before its last product."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from inl.executor.loaded import Loaded
    from inl.ops.protocol import Ops


class HiddenOps:
    """The ops of a model's head, without its product with the vocabulary."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def around(self, ops: Ops) -> HiddenOps:
        """Return the same over other ops."""
        return HiddenOps(ops)

    def norm_logits(
        self, residual: Any, delta: Any, samples: Any, norm: Any, _w: Any, *, eps: float
    ) -> Any:
        ops = self._ops
        residual = ops.take_rows(residual, samples)
        delta = ops.take_rows(delta, samples)
        return ops.reduce_add_norm(residual, delta, norm, eps=eps)[1]

    def linear(self, x: Any, _w: Any) -> Any:
        return x

    def soft_cap(self, x: Any, **_: Any) -> Any:
        return x

    def all_gather(self, x: Any, **_: Any) -> Any:
        return x


def hidden_head(head: Any, ops: Ops, *args: Any) -> Any:
    """Return the normalized hidden states [S, H] that a head multiplies."""
    return head(cast("Ops", HiddenOps(ops)), *args)


def pooled(loaded: Loaded) -> Loaded:
    """Return the model of programs that end before the product of the head.

    Without weights, so that what is compiled from it refers to none.
    """
    head = partial(hidden_head, loaded.model.head)
    model = replace(loaded.model, head=head, vocab_size=None)
    return replace(
        loaded, model=model, weights=None, adapters=None, taps=(),
        ends_before_head=True,
    )  # fmt: skip

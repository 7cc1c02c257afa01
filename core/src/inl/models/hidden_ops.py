"""Ops of a model's head that return hidden states in place of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
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


class AllHiddenOps(HiddenOps):
    """The same for all tokens, in place of the sampled ones."""

    def around(self, ops: Ops) -> AllHiddenOps:
        return AllHiddenOps(ops)

    def norm_logits(
        self, residual: Any, delta: Any, _samples: Any, norm: Any, _w: Any, *,
        eps: float,
    ) -> Any:  # fmt: skip
        return self._ops.reduce_add_norm(residual, delta, norm, eps=eps)[1]

    def take_rows(self, x: Any, _samples: Any) -> Any:
        return x


def hidden_head(
    head: Any, ops: Ops, *args: Any, kind: type[HiddenOps] = HiddenOps
) -> Any:
    """Return the normalized hidden states that a head multiplies.

    [S, H] of the sampled tokens, or [T, H] by :class:`AllHiddenOps`.
    """
    return head(cast("Ops", kind(ops)), *args)

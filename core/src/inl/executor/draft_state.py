"""Ops of a program that verifies drafts of a model with recurrent layers."""

from __future__ import annotations

from typing import Any

from inl.spec.cache import State
from inl.spec.step import Array, Step


class RecurrentOps:
    """Computes recurrent layers on copies of their state; passes other ops on.

    :meth:`committed` computes the state of the accepted tokens once they are known.
    That takes the layers' recurrences again, not their products with weights.
    """

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self._calls: list[
            tuple[str, tuple[Array, ...], Array, Any, dict[str, Any]]
        ] = []
        self._copied: tuple[Array, Step] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def causal_conv(self, *args: Any) -> tuple[Array, Array]:
        """Compute :data:`inl.ops.recurrent.causal_conv`; the table stays."""
        return self._computed("causal_conv", args, {})

    def delta_rule(self, *args: Any, tiled: bool) -> tuple[Array, Array]:
        """Compute :data:`inl.ops.recurrent.delta_rule`; the table stays."""
        return self._computed("delta_rule", args, {"tiled": tiled})

    def ssm_scan(self, *args: Any) -> tuple[Array, Array]:
        """Compute :data:`inl.ops.ssm.ssm_scan`; the table stays."""
        return self._computed("ssm_scan", args, {})

    def _computed(
        self, name: str, args: tuple[Any, ...], attrs: dict[str, Any]
    ) -> tuple[Array, Array]:
        *inputs, table, step, w = args
        if self._copied is None:
            self._copied = self._ops.own_slots(step)
        slots, own = self._copied
        copy = self._ops.take_rows(table, slots)
        out, _ = getattr(self._ops, name)(*inputs, copy, own, w, **attrs)
        self._calls.append((name, tuple(inputs), table, w, attrs))
        return out, table

    def committed(self, kept: Array, step: Step, state: State) -> State:
        """Return the state after the accepted tokens.

        kept: int32 [R * W] of :data:`inl.ops.verify.verify`; step: of the program.
        """
        width = self._ops.bucket.tokens_per_row
        index, accepted = self._ops.accepted_rows(kept, step, width=width)
        tables = dict(state.slotted)
        for name, inputs, table, w, attrs in self._calls:
            taken = [self._ops.take_rows(each, index) for each in inputs]
            _, found = getattr(self._ops, name)(*taken, table, accepted, w, **attrs)
            (place,) = (key for key, each in tables.items() if each is table)
            tables[place] = found
        return state._replace(slotted=tables)

"""What a draft head computes beside the model that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.spec.cache import Paged
from inl.spec.step import Array, Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops
    from inl.spec.cache import State


class Hidden(NamedTuple):
    """Hidden states of a step of a draft head."""

    rows: Array
    """[T] rows of ``source``, int32."""
    source: Array
    """[N, tapped] of the target, or [N, H] of the draft head itself."""


@dataclass(frozen=True, slots=True)
class DraftModule:
    """Pure functions of a kind of draft heads.

    Configs have ``dtype``, ``in_dtype(dtype)``, ``taps``, ``tapped`` (elements of the
    hidden states of all taps), ``hidden_size`` and ``draft_vocab``.
    """

    weights: Callable[[Any], Any]
    """(config) -> weight tree; groups that the head shares are ``None``."""
    state: Callable[[Any], tuple[Paged, ...]]
    """(config) -> the cache group of the head."""
    draft: Callable[..., tuple[Array, Array, State]]
    """(ops, config, w, message, hidden, state, *, is_tapped) -> the most likely token
    of each row, of the draft vocabulary, the hidden states [R, H] that further drafts
    are computed from, and the state. is_tapped: whether the hidden states are those of
    the target."""
    shared: Callable[[Any], Mapping[str, str]]
    """(config) -> the target's weight groups that the head shares, by the head's
    names."""


def begin(ops: Ops, message: Array, state: State) -> tuple[Step, State]:
    """Decode the message of a draft head's step."""
    step, tables = ops.make_step(
        message, state.tables, bucket=ops.bucket, block_size=ops.block_size
    )
    step = step._replace(plan=ops.plan(step, block_size=ops.block_size))
    return step, state._replace(tables=tables)


def join_columns(ops: Ops, left: Array, right: Array) -> Array:
    """Concatenate [T, N] and [T, M] along the last axis."""
    parts = [x.reshape(x.shape[0], 1, x.shape[1]) for x in (left, right)]
    joined = ops.join_lanes(*parts)
    return joined.reshape(joined.shape[0], joined.shape[2])

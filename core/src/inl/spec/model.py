"""An architecture: what to load, what it remembers, and three pure functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inl.spec.cache import Paged, Slotted, State
from inl.spec.step import Array


def as_it_is(config: Any, checkpoint: Any) -> tuple[Any, Any]:
    """Read a checkpoint under the names that it has."""
    return config, checkpoint


@dataclass(frozen=True, slots=True)
class Model:
    """An architecture: what to load, what it remembers, and three pure functions.

    The core owns the loop over layers. Each function is written per shard: counts
    come from shapes, per-head sizes from the config.
    """

    config: Callable[[Mapping[str, Any]], Any]
    """(hf config dict) -> frozen, hashable config."""
    weights: Callable[[Any], Any]
    """(config) -> NamedTuple with a ``layers`` tuple; its leaves are :class:`Group`."""
    state: Callable[[Any], tuple[Paged | Slotted, ...]]
    """(config) -> what a sequence leaves behind."""
    embed: Callable[..., tuple[Array, ...]]
    """(ops, config, w, step) -> carry: tuple of [T, ...]."""
    layer: Callable[..., tuple[tuple[Array, ...], State]]
    """(ops, config, w, carry, step, state, *, index) -> (carry, state).

    One with a parameter ``sampled=None`` is given, as the last layer of a step with
    more tokens than rows, the step of the sampled tokens alone: it caches keys and
    values of all tokens, and its carry is [R, ...], of those that are sampled.
    """
    head: Callable[..., Array]
    """(ops, config, w, carry, step) -> logits [S, V]."""
    adapt: Callable[[Any, Any], tuple[Any, Any]] = as_it_is
    """(config, checkpoint) -> both as ``weights`` has them: for older layouts."""

    @property
    def prunes_last_layer(self) -> bool:
        """Whether the last layer can compute the sampled tokens alone."""
        return "sampled" in inspect.signature(self.layer).parameters

"""Model definition: weights to load, state per sequence, and three pure functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from inl.spec.cache import Paged, Slotted, State
from inl.spec.step import Array


def unchanged(config: Any, checkpoint: Any) -> tuple[Any, Any]:
    """Return both arguments: the default of :attr:`Model.adapt`."""
    return config, checkpoint


class ModelInputs(NamedTuple):
    """What a model takes of a token beside its id or an embedding in its place."""

    axes: int = 0
    """Axes of positions, see :attr:`inl.ops.rope.RopeScaling.axes`; 0 for one."""
    spans: bool = False
    """Whether spans of tokens attend to each other in both directions."""
    feature_layers: tuple[int, ...] = ()
    """Layers after which features are added to ``residual`` of the carry."""
    windowed_spans: bool = False
    """Whether spans do so in the layers with a window only."""
    embedded_id: int | None = None
    """Token id by which further tables are looked up where a token has an embedding;
    ``None``: by its own."""


def no_inputs(_config: Any) -> ModelInputs:
    """Return no inputs: the default of :attr:`Model.inputs`."""
    return ModelInputs()


COMPUTATIONS: dict[tuple[Callable[..., Any], ...], str] = {}
"""(embed, layer, head) -> name of what these functions of models compute, by which a
backend that computes whole models recognizes them."""


@dataclass(frozen=True, slots=True)
class Model:
    """An architecture: weights to load, state per sequence, and three pure functions.

    The executor runs the loop over layers. Each function is written per tensor-parallel
    shard: it takes counts from shapes and per-head sizes from the config. ``ops`` is
    an :class:`inl.ops.protocol.Ops`.
    """

    config: Callable[[Mapping[str, Any]], Any]
    """(Hugging Face config dict) -> frozen, hashable config."""
    weights: Callable[[Any], Any]
    """(config) -> NamedTuple with a ``layers`` tuple; its leaves are :class:`Group`."""
    state: Callable[[Any], tuple[Paged | Slotted, ...]]
    """(config) -> what each sequence stores between steps."""
    embed: Callable[..., tuple[Array, ...]]
    """(ops, config, w, step) -> carry: tuple of [T, ...]."""
    layer: Callable[..., tuple[tuple[Array, ...], State]]
    """(ops, config, w, carry, step, state, *, index) -> (carry, state).

    A layer function with a parameter ``sampled_step=None`` supports pruning. In a step
    with more tokens than rows, its last layer receives the step of the sampled tokens
    in that parameter; it caches keys and values of all tokens and returns a carry of
    [R, ...] for the sampled tokens only.
    """
    head: Callable[..., Array]
    """(ops, config, w, carry, step) -> logits [S, V]."""
    adapt: Callable[[Any, Any], tuple[Any, Any]] = unchanged
    """(config, checkpoint) -> both in the layout that ``weights`` declares; converts
    older checkpoint layouts."""
    vocab_size: int | None = None
    """V, if the head has further rows so that ranks divide it; their logits are not
    used."""
    inputs: Callable[[Any], ModelInputs] = no_inputs
    """(config) -> what steps may have of each token beside embeddings."""

    @property
    def computes(self) -> str:
        """Name in :data:`COMPUTATIONS` of what the functions compute, or empty."""
        return COMPUTATIONS.get((self.embed, self.layer, self.head), "")

    @property
    def prunes_last_layer(self) -> bool:
        """Whether the last layer can compute only the sampled tokens."""
        return "sampled_step" in inspect.signature(self.layer).parameters


def is_recurrent(model: Model, config: Any) -> bool:
    """Whether the model has state that every token changes."""
    return any(
        isinstance(item, Slotted) and item.rebuild == "tokens"
        for item in model.state(config)
    )

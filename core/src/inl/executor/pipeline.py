"""Pipeline stages: a range of a model's layers on each rank along the pipeline axis.

Every stage gets every frame. It receives the activations of the stage before, computes
its layers, and sends them on. The last stage computes the logits and samples. Tokens
reach the other stages in the frames of later steps, see
:mod:`inl.runners.returned_tokens`; those of a step that verifies drafts, which change
the lengths of sequences, are sent to all stages in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from inl.backend.collectives import PIPELINE, Collectives
from inl.errors import RequestError, WeightMismatch
from inl.executor.embedding_ops import EmbeddingOps
from inl.executor.model_step import begin, layers
from inl.spec.cache import Paged, Slotted, State
from inl.spec.dispatch import Tracer
from inl.spec.op import Spec
from inl.spec.strict_array import StrictArray
from inl.spec.tree import leaves, tree_map
from inl.weights.plan import plan_weights

if TYPE_CHECKING:
    from inl.ops.protocol import Ops
    from inl.spec.limits import Limits
    from inl.spec.model import Model
    from inl.spec.selection import KernelSelection
    from inl.spec.step import Array, Step, Tables

FIRST = ("embed", "start")
"""Fields of a model's weights that only the first stage has."""
LAST = ("norm", "head")
"""Fields of a model's weights that only the last stage has."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A position along the pipeline axis."""

    index: int = 0
    count: int = 1

    def layers(self, total: int) -> range:
        """Return the layers of this stage; sizes differ by one at most."""
        start, stop = (
            total * each // self.count for each in (self.index, self.index + 1)
        )
        return range(start, stop)

    @property
    def is_last(self) -> bool:
        """Whether it samples the tokens."""
        return self.index == self.count - 1

    def limits(self, limits: Limits, depth: int | None = None) -> Limits:
        """Return limits for steps that keep all stages busy.

        depth: steps in flight; by default one more than there are stages, so that the
        next one is sent before the oldest is collected.
        """
        if self.count == 1:
            return limits
        depth = depth or self.count + 1
        lanes = min(self.count, depth)
        return replace(limits, depth=depth, decode_steps=1, stages=lanes)


WHOLE = Stage()
"""The only stage of a model on one device."""


def check_stages(model: Model, config: Any, stages: int, adapters: int) -> None:
    """Check that a model can be divided into stages.

    adapters: number that programs have room for. Raises
    :class:`~inl.errors.WeightMismatch` or :class:`~inl.errors.RequestError`.
    """
    if stages == 1:
        return
    layers = len(model.weights(config).layers)
    if layers < stages:
        raise WeightMismatch(
            f"placement: found pipeline={stages} for {layers} layers; accepted: 1 to "
            f"{layers}"
        )
    for item in model.state(config):
        if isinstance(item, Slotted):
            raise WeightMismatch(
                f"state {item.name} of each sequence: found pipeline={stages}; "
                "accepted: pipeline=1"
            )
    cached = sum(len(i.layers) for i in model.state(config) if isinstance(i, Paged))
    if cached < layers:
        raise WeightMismatch(
            f"caches of {cached} layers, shared by {layers}: found pipeline={stages}; "
            "accepted: pipeline=1"
        )
    if model.inputs(config).feature_layers:
        raise WeightMismatch(
            f"features added between layers: found pipeline={stages}; accepted: "
            "pipeline=1"
        )
    if adapters:
        raise RequestError(
            f"adapters: found {adapters} with pipeline={stages}; accepted: 0"
        )


def stage_of(
    model: Model,
    config: Any,
    stage: Stage,
    collectives: Collectives | None,
    *,
    selection: KernelSelection,
    stored: Mapping[str, Spec],
    ranks: int,
) -> Model:
    """Return the part of a model that a stage computes.

    It has the weights and caches of its layers only. collectives: ``None`` for a stage
    that is only described. selection, stored, ranks: how the whole model is planned.
    """
    tree = model.weights(config)
    own = stage.layers(len(tree.layers))
    shapes = Shapes(model, config, selection, stored, ranks)
    is_first, is_last = stage.index == 0, stage.is_last

    def weights(config: Any) -> Any:
        tree = model.weights(config)
        dropped = (() if is_first else FIRST) + (() if is_last else LAST)
        absent = {name: None for name in dropped if name in tree._fields}
        return tree._replace(layers=tree.layers[own.start : own.stop], **absent)

    def state(config: Any) -> tuple[Any, ...]:
        return tuple(_caches_of(item, own) for item in model.state(config))

    def embed(ops: Ops, config: Any, w: Any, step: Step) -> Any:
        if is_first:
            return model.embed(ops, config, w, step)
        carry = shapes.carry(ops, step)
        if is_traced(step):
            return tree_map(lambda x: StrictArray(x.shape, x.dtype), carry)
        return _received(collectives, carry, stage.index - 1)

    def head(ops: Ops, config: Any, w: Any, carry: Any, step: Step) -> Array:
        if is_last:
            return model.head(ops, config, w, carry, step)
        if is_traced(step):
            shape = shapes.logits(ops, step)
            return StrictArray(shape.shape, shape.dtype)
        _sent(collectives, carry, stage.index + 1)
        return step.tokens  # nothing reads it

    return replace(
        model, weights=weights, state=state, embed=embed, head=head,
        layer=_layer_of(model, own.start, prunes=is_last),
    )  # fmt: skip


class ReturningOps:
    """The ops of a last stage, which sends tokens to all others before it verifies."""

    def __init__(self, ops: Ops, stage: Stage, collectives: Collectives | None) -> None:
        self._ops, self._stage, self._collectives = ops, stage, collectives

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def verify(self, tokens: Array, step: Step, tables: Tables, *, width: int) -> Any:
        """Compute :data:`inl.ops.verify.verify`."""
        for index in range(self._stage.index):
            _sent(self._collectives, tokens, index)
        return self._ops.verify(tokens, step, tables, width=width)


def pass_on(
    ops: Ops, model: Model, config: Any, weights: Any, message: Array, *given: Any,
    stage: Stage, collectives: Collectives | None, table_width: int | None = None,
) -> tuple[State]:  # fmt: skip
    """Compute a step of a stage that is not the last; its head sends the carry.

    given: embeddings of the step, if it has any, and the state. With drafts, the
    tokens that the last stage samples decide the lengths of sequences.
    """
    *embedded, state = given
    step, state = begin(ops, message, state, table_width)
    for rows in embedded:
        ops = cast("Ops", EmbeddingOps(ops, rows, step, model.inputs(config)))
    carry, state = layers(ops, model, config, weights, step, None, state)
    model.head(ops, config, weights, carry, step)
    if ops.bucket.verifies:
        spec = Spec((ops.bucket.samples,), "int32")
        tokens = _received(collectives, spec, stage.count - 1)
        width = ops.bucket.tokens_per_row
        _, tables = ops.verify(tokens, step, state.tables, width=width)
        state = state._replace(tables=tables)
    return (state,)


def _caches_of(item: Paged | Slotted, own: range) -> Paged | Slotted:
    """Return the part of a cache group that belongs to some layers."""
    if isinstance(item, Slotted):
        return item
    at = [n for n, layer in enumerate(item.layers) if layer in own]
    scales = tuple(item.scales[n] for n in at) if item.scales else ()
    return item._replace(layers=tuple(item.layers[n] for n in at), scales=scales)


def _layer_of(model: Model, first: int, *, prunes: bool) -> Callable[..., Any]:
    """Return the layer function of a stage, whose layers count from 0.

    prunes: whether the last one may compute only the sampled tokens; its signature says
    so, see :attr:`~inl.spec.model.Model.layer`.
    """

    def layer(
        ops: Ops, config: Any, w: Any, carry: Any, step: Step, state: State, *,
        index: int, **options: Any,
    ) -> tuple[Any, State]:  # fmt: skip
        # Models find the cache of a layer by its number.
        whole = state._replace(caches=((None,) * first + state.caches))
        carry, whole = model.layer(
            ops, config, w, carry, step, whole, index=first + index, **options
        )
        return carry, whole._replace(caches=whole.caches[first:])

    def pruned_layer(
        *args: Any, sampled_step: Step | None = None, **options: Any
    ) -> tuple[Any, State]:
        if sampled_step is not None:
            options["sampled_step"] = sampled_step
        return layer(*args, **options)

    return pruned_layer if prunes and model.prunes_last_layer else layer


class Shapes:
    """Shapes of what stages exchange, by tracing the model without its layers."""

    def __init__(
        self,
        model: Model,
        config: Any,
        selection: KernelSelection,
        stored: Mapping[str, Spec],
        ranks: int,
    ) -> None:
        self._model, self._config, self._selection = model, config, selection
        self._ranks = ranks
        tree = model.weights(config)._replace(layers=())
        groups = plan_weights(tree, selection.kernels, stored, ranks=ranks)
        self._weights = tree_map(lambda plan: plan.specs(config.dtype), groups)
        self._known: dict[Any, Any] = {}

    def carry(self, ops: Ops, step: Step) -> Any:
        """Return the carry of a step's tokens, a tree of :class:`Spec`."""
        return self._of("carry", ops, step)

    def logits(self, ops: Ops, step: Step) -> Spec:
        """Return what the head computes for a step: logits, or hidden states."""
        spec: Spec = self._of("logits", ops, step)
        return spec

    def _of(self, what: str, ops: Ops, step: Step) -> Any:
        around = getattr(ops, "around", None)
        sizes = tuple(tuple(x.shape) for x in leaves(step._replace(plan=())))
        key = what, around is not None, ops.bucket, sizes
        if key not in self._known:
            tracer: Any = Tracer(self._selection, ops.bucket, ops.block_size)
            strict = tree_map(
                lambda x: StrictArray(tuple(x.shape), "int32"), step._replace(plan=())
            )
            found: Any = self._model.embed(tracer, self._config, self._weights, strict)
            if what == "logits":
                tracer = around(tracer) if around else tracer
                found = self._model.head(
                    tracer, self._config, self._weights, found, strict
                )
                if around is None:  # gathered over the ranks, which a trace is not
                    rows, columns = found.shape
                    found = StrictArray((rows, columns * self._ranks), found.dtype)
            self._known[key] = tree_map(lambda x: Spec(x.shape, x.dtype), found)
        return self._known[key]


def is_traced(step: Step) -> bool:
    """Whether a step has no data."""
    return isinstance(step.tokens, StrictArray)


def _sent(collectives: Collectives | None, tree: Any, target: int) -> None:
    assert collectives is not None, "a stage that is only described computes nothing"
    for leaf in leaves(tree):
        collectives.send(leaf, PIPELINE, target)


def _received(collectives: Collectives | None, tree: Any, source: int) -> Any:
    """Receive a tree of :class:`Spec`."""
    assert collectives is not None, "a stage that is only described has no peers"
    if isinstance(tree, Spec):
        return collectives.recv(tree, PIPELINE, source)
    parts = [_received(collectives, each, source) for each in tree]
    return type(tree)(*parts)

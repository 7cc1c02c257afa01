"""A model whose layers and head are one OpenVINO graph.

The core calls ``embed``, each ``layer`` and ``head`` of a model. Here ``embed`` runs on
the host, a ``layer`` does nothing, and ``head`` runs the graph of all layers and the
head, for which the model's own functions were called once with values of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.spec.cache import State
from inl.spec.dispatch import DynamicOps
from inl.spec.model import Model
from inl.spec.step import Step
from inl.spec.tree import leaves, tree_map
from inl_intel.openvino.attention import Layer
from inl_intel.openvino.graph import Graph, Value

if TYPE_CHECKING:
    from inl.spec.kernel import Kernel
    from inl_intel.openvino.compiled import CompiledModel


class Begun(NamedTuple):
    """What the core passes from layer to layer: the inputs of the graph."""

    carry: Any
    """The result of the model's ``embed``: arrays [T, ...]."""
    state: State | None = None


class Form(NamedTuple):
    """How graphs read and write the cache."""

    kernels: Sequence[Kernel]
    graph: Callable[[Step], Graph]
    """Makes the graph for steps like this one."""
    compiled: Callable[[Any, Value], CompiledModel]
    """(graph, its logits) -> what computes steps with it."""
    shared_by: Callable[[Step], Hashable]
    """Steps with equal results are computed by one graph."""


def graph_model(model: Model, form: Form) -> Model:
    """Return ``model`` with its layers and head in graphs of OpenVINO."""
    weights: list[Any] = []
    made: dict[Hashable, CompiledModel] = {}

    def embed(ops: Any, config: Any, w: Any, step: Step) -> Begun:
        return Begun(model.embed(ops, config, w, step))

    def layer(
        _ops: Any, _config: Any, _w: Any, carry: Begun, _step: Step, state: State, *,
        index: int,
    ) -> tuple[Begun, State]:  # fmt: skip
        return (carry if index else carry._replace(state=state)), state

    def head(_ops: Any, config: Any, w: Any, carry: Begun, step: Step) -> Any:
        if not weights or weights[0] is not w:
            made.clear()
            weights[:] = [w]
        key = form.shared_by(step)
        if key not in made:
            graph = form.graph(step)
            logits = traced(graph, model, config, w, carry.carry, step, form.kernels)
            made[key] = form.compiled(graph, logits)
        assert carry.state is not None, "a model has layers"
        return made[key](carry.carry, step, carry.state)

    return replace(model, embed=embed, layer=layer, head=head)


def traced(
    graph: Graph, model: Model, config: Any, w: Any, carry: Any, step: Step,
    kernels: Sequence[Kernel],
) -> Value:  # fmt: skip
    """Call the layers and the head of a model with values; returns the logits.

    carry: arrays [T, ...], for whose shapes the graph is made.
    """
    names = (f"carry.{number}" for number in range(len(list(leaves(carry)))))
    carry = tree_map(lambda leaf: graph.input(next(names), leaf), carry)
    step = step._replace(
        samples=graph.input("samples", step.samples),
        positions=graph.input("positions", step.positions),
    )
    count = len(w.layers)
    tables: Any = None  # only steps are computed from them
    state = State(
        caches=tuple(Layer(index) for index in range(count)), slotted={}, tables=tables
    )
    ops: Any = DynamicOps(kernels)
    pruned = step
    for index, layer in enumerate(w.layers):
        options: dict[str, Any] = {}
        if index == count - 1 and model.prunes_last_layer:
            taken = Value(graph, None, "int32", step.samples.shape)
            pruned = step._replace(samples=taken)
            # Attention gathers the rows of the last layer at the step's samples.
            options = {"sampled_step": pruned}
        carry, state = model.layer(
            ops, config, layer, carry, step, state, index=index, **options
        )
    logits: Value = model.head(ops, config, w, carry, pruned)
    return logits

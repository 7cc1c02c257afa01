"""Exports a function of tensors to an ONNX model.

The function is called once with graph values in place of its tensors, as ``jax.jit``
calls one with tracers; the model definition of the core is read this way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import onnx

from inl.spec.tree import leaves, tree_map
from inl_onnx.graph import Graph, Value

ARGUMENT = "a"
"""First letter of the name of an input; its number among the leaves follows."""


class Output(NamedTuple):
    """A result of a program."""

    name: str
    """Name in the graph; empty if it is an argument, unchanged."""
    argument: int
    """Leaf of the arguments that it is, or whose buffer it may have; -1 is none."""
    dtype: str
    shape: tuple[int, ...]


class Exported(NamedTuple):
    """An ONNX model of a function."""

    model: onnx.ModelProto
    inputs: tuple[int, ...]
    """Leaves of the arguments that the graph reads, in order of its inputs."""
    outputs: tuple[Output, ...]
    tree: Any
    """Results of the function, with an index into ``outputs`` for each tensor."""


def export(
    function: Callable[..., Any], args: tuple[Any, ...], static: dict[str, Any]
) -> Exported:
    """Trace ``function(*args, **static)`` for the shapes and dtypes of ``args``."""
    graph = Graph()
    given: list[Value] = []

    def value(leaf: Any) -> Value:
        shape = tuple(leaf.shape)
        made = graph.input(f"{ARGUMENT}{len(given)}", leaf.dtype, shape)
        given.append(made)
        return made

    results = function(*tree_map(value, args), **static)
    found: list[Value] = []
    index: dict[str, int] = {}

    def place(leaf: Any) -> int:
        if not isinstance(leaf, Value):
            leaf = graph.constant(leaf)
        if leaf.name not in index:
            index[leaf.name] = len(found)
            found.append(leaf)
        return index[leaf.name]

    tree = tree_map(place, results)
    numbers = {value.name: number for number, value in enumerate(given)}
    constants = {value.name for value in graph.constants.values()}
    computed = [
        value.node("Identity") if value.name in constants else value for value in found
    ]
    model = graph.model([v for v in computed if v.name not in numbers])
    shared = in_place(graph, computed, numbers)
    outputs = tuple(
        Output("", numbers[value.name], value.dtype, value.shape)
        if value.name in numbers
        else Output(value.name, shared.get(value.name, -1), value.dtype, value.shape)
        for value in computed
    )
    inputs = tuple(numbers[each.name] for each in model.graph.input)
    return Exported(model, inputs, outputs, tree)


def in_place(
    graph: Graph, outputs: list[Value], numbers: dict[str, int]
) -> dict[str, int]:
    """Return the argument over which each output may be written, by output name.

    An output may have the buffer of an argument if it is the argument with some entries
    replaced (``ScatterND``), and every other node that reads the argument is computed
    before, because the replacement needs its result.
    """
    made = {name: node for node in graph.nodes for name in node.output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    found = {}
    for value in outputs:
        replacement = made.get(value.name)
        if replacement is None or replacement.op_type != "ScatterND":
            continue
        source = replacement.input[0]
        if source not in numbers:
            continue
        others = {node.output[0] for node in readers[source]} - {value.name}
        if others <= ancestors(replacement, made):
            found[value.name] = numbers[source]
    return found


def ancestors(node: onnx.NodeProto, made: dict[str, onnx.NodeProto]) -> set[str]:
    """Return the first outputs of all nodes whose results a node needs."""
    seen: set[str] = set()
    waiting = list(node.input)
    while waiting:
        source = made.get(waiting.pop())
        if source is not None and source.output[0] not in seen:
            seen.add(source.output[0])
            waiting.extend(source.input)
    return seen


def signature(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return shapes and dtypes of all leaves, and the structure around them."""
    return tuple((leaf.dtype, tuple(leaf.shape)) for leaf in leaves(args)), _shape(args)


def _shape(tree: Any) -> Any:
    if isinstance(tree, dict):
        return tuple((key, _shape(tree[key])) for key in tree)
    if isinstance(tree, (tuple, list)):
        return type(tree), tuple(map(_shape, tree))
    return tree is None

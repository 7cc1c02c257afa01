"""A call of one op outside of a step, as a graph of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.errors import DeviceError
from inl.spec.tree import leaves, tree_map
from inl_intel.openvino.graph import Graph, Value

if TYPE_CHECKING:
    from inl_intel.openvino.runtime import Runtime


class SingleGraph(Graph):
    """A graph for arguments of fixed shapes, without a cache."""

    fixed = True

    def attend(self, *_: Any, **_attrs: Any) -> Value:
        raise DeviceError("attention: OpenVINO computes it in the graph of a step only")


def evaluated(
    run: Callable[..., Any], runtime: Runtime, args: Any, attrs: dict[str, Any]
) -> Any:
    """Return what a function of values computes for arrays; weights are constants.

    For checks and experiments: every call compiles a graph.
    """
    graph, given = SingleGraph(), dict[str, Any]()

    def value(array: Any) -> Value:
        name = f"a{len(given)}"
        given[name] = np.ascontiguousarray(array)
        return graph.input(name, array)

    names = list(inspect.signature(run).parameters)
    values = [
        arg if name == "w" else tree_map(value, arg)
        for name, arg in zip(names, args, strict=False)
    ]
    results = run(*values, **attrs)
    first, *others = leaves(results)
    graph.results += [each.output for each in others]
    found = iter(runtime.compile(graph, first)(given).to_tuple())
    return tree_map(lambda _: np.array(next(found)), results)

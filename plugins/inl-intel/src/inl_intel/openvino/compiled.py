"""A graph of a model that is compiled for a device, and the request that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov

from inl.errors import OutOfMemory
from inl.spec.tree import leaves

if TYPE_CHECKING:
    from inl.spec.cache import State
    from inl.spec.step import Step
    from inl_intel.openvino.graph import Graph, Value
    from inl_intel.openvino.runtime import Runtime

NO_MEMORY = ("bad_alloc", "out of memory", "allocate")
"""Texts of OpenVINO's errors for a failed allocation."""


class CompiledModel(ABC):
    """Computes steps with one compiled graph."""

    def __init__(self, graph: Graph, logits: Value, runtime: Runtime) -> None:
        self.runtime = runtime
        self.compiled = runtime.compile(graph, logits)
        self.request = self.compiled.create_infer_request()
        self.names = [each.get_any_name() for each in self.compiled.inputs]
        self._vocab = logits.shape[-1]
        self._fed: dict[str, Any] = {}

    def __call__(self, carry: Any, step: Step, state: State) -> Any:
        """Compute a step; returns its logits, float32 [S, V].

        carry: result of the model's ``embed``, arrays [T, ...]. The caches of ``state``
        are written in place. Logits of padding are undefined. Raises
        :class:`~inl.errors.OutOfMemory`.
        """
        tokens = int(step.used_counts[2])
        if not tokens:
            return np.zeros((len(step.samples), self._vocab), np.float32)
        given = {f"carry.{i}": array for i, array in enumerate(leaves(carry))}
        self._set(self.inputs(step, state, given))
        try:
            self.request.infer()
        except RuntimeError as error:
            if any(text in str(error) for text in NO_MEMORY):
                raise OutOfMemory(last_line(error)) from error
            raise
        self.finish(step, state)
        return np.array(self.request.get_output_tensor(0).data)

    def _set(self, inputs: dict[str, Any]) -> None:
        """Give the request the arrays that the graph reads."""
        read = (name for name in self.names if name in inputs)
        # The request refers to the memory of these arrays.
        self._fed = {name: np.asarray(inputs[name], order="C") for name in read}
        for name, array in self._fed.items():
            shared = array.ndim > 0
            self.request.set_tensor(name, ov.Tensor(array, shared_memory=shared))

    @abstractmethod
    def inputs(self, step: Step, state: State, carry: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of a step by name; the graph may read fewer.

        carry: those that ``embed`` has computed, for all tokens.
        """

    @abstractmethod
    def finish(self, step: Step, state: State) -> None:
        """Store what the request has computed beside the logits."""


def last_line(error: Exception) -> str:
    """Return the reason in an error of OpenVINO, which follows where it was raised."""
    return next(reversed(lines(error)), "")


def lines(error: Exception) -> list[str]:
    """Return the lines of an error that are not empty."""
    return [line.strip() for line in str(error).splitlines() if line.strip()]

"""An OpenVINO graph under construction, and its values.

A value behaves as a tensor of the contract: ``+ - *``, slices, ``reshape``. Its first
axis counts tokens, whose number may differ from step to step; all other sizes are
static.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from inl.errors import DeviceError

DTYPES = {
    "float32": ov.Type.f32,
    "int32": ov.Type.i32,
}
"""Dtypes of values; a graph in a smaller dtype converts them itself."""


class Graph(ABC):
    """The inputs and results of a graph, and the constants that it uses."""

    fixed = False
    """Whether it serves one number of tokens."""

    def __init__(self) -> None:
        self.inputs: dict[str, Any] = {}
        """Name -> its parameter node."""
        self.results: list[Any] = []
        """Outputs of nodes that are results beside the logits."""
        self._constants: dict[int, tuple[Any, Value]] = {}

    def parameter(self, name: str, kind: Any, shape: Sequence[int]) -> Any:
        """Return the output of an input node, made at the first call for its name.

        kind: element type of OpenVINO. shape: -1 is any size.
        """
        if name not in self.inputs:
            node = ops.parameter(ov.PartialShape(list(shape)), kind, name=name)
            node.output(0).get_tensor().set_names({name})
            self.inputs[name] = node
        return self.inputs[name].output(0)

    def input(self, name: str, array: Any) -> Value:
        """Return an input for arrays like this one, of any number of tokens."""
        shape, dtype = tuple(array.shape), str(array.dtype)
        kind = DTYPES.get(dtype)
        if kind is None:
            raise DeviceError(f"{name}: found {dtype}, accepts {', '.join(DTYPES)}")
        sizes = shape if self.fixed else (-1, *shape[1:])
        return Value(self, self.parameter(name, kind, sizes), dtype, shape)

    @abstractmethod
    def attend(
        self, q: Value, k: Value, v: Value, *, layer: int, group: int, scale: float,
        window: int | None, cap: float | None,
    ) -> Value:  # fmt: skip
        """Write keys and values to the cache of a layer, and attend to it.

        q: [T, heads, dim]. k, v: [T, kv_heads, dim]. group: that of the block table.
        The other arguments are those of the op "attention". Returns [T, heads, dim of
        v].
        """

    def weight(self, array: Any) -> Value:
        """Return a constant that refers to the memory of an array of weights."""
        if id(array) not in self._constants:
            data = np.ascontiguousarray(array, "float32")
            node = ops.constant(data, shared_memory=True)
            value = Value(self, node.output(0), "float32", data.shape)
            self._constants[id(array)] = array, value
        return self._constants[id(array)][1]


class Value:
    """A tensor in a graph: its output of a node, dtype name and shape when traced."""

    __slots__ = ("dtype", "graph", "output", "shape", "source")
    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # NumPy's operators leave the work to this class

    def __init__(
        self,
        graph: Graph,
        output: Any,
        dtype: str,
        shape: Sequence[int],
        *,
        source: tuple[Value, Value] | None = None,
    ) -> None:
        self.graph, self.output, self.dtype = graph, output, dtype
        self.shape = tuple(int(size) for size in shape)
        self.source = source
        """The value and the indices of which this has the rows."""

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)} of OpenVINO"

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def made(self, output: Any, shape: Sequence[int] | None = None) -> Value:
        """Return the first output of a node, of the dtype of this value."""
        first = output if isinstance(output, ov.Output) else output.output(0)
        return Value(
            self.graph, first, self.dtype, self.shape if shape is None else shape
        )

    def reshape(self, *shape: Any) -> Value:
        """As NumPy's, of the axes behind the first; one size may be -1."""
        sizes = list(shape[0] if len(shape) == 1 and np.ndim(shape[0]) else shape)
        if -1 in sizes:
            known = -math.prod(sizes)
            sizes[sizes.index(-1)] = math.prod(self.shape) // known
        if math.prod(sizes) != math.prod(self.shape) or sizes[0] != self.shape[0]:
            raise DeviceError(
                f"reshape: {self!r} to {sizes}: the first axis is that of the tokens, "
                "and its size is not known before a step"
            )
        if tuple(sizes) == self.shape:
            return self
        target = ops.constant(np.array([0, *sizes[1:]], np.int64))
        return self.made(ops.reshape(self.output, target, True), sizes)

    def __getitem__(self, key: Any) -> Value:
        """Slices of the axes behind the first, and one ``...``."""
        keys = list(key if isinstance(key, tuple) else (key,))
        if ... in keys:
            at = keys.index(...)
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        result = self
        for axis, each in enumerate(keys):
            if each == slice(None):
                continue
            if not axis or not isinstance(each, slice):
                raise DeviceError(
                    f"{self!r}[{key}]: a graph for any number of tokens has slices of "
                    "the axes behind the first only"
                )
            result = result.sliced(axis, each)
        return result

    def sliced(self, axis: int, part: slice) -> Value:
        """Return a slice of one axis."""
        size = self.shape[axis]
        start, stop, step = part.indices(size)
        shape = list(self.shape)
        shape[axis] = len(range(start, stop, step))
        bounds = [ops.constant(np.array([x])) for x in (start, stop, step, axis)]
        return self.made(ops.slice(self.output, *bounds), shape)

    def with_operand(
        self, node: Callable[..., Any], other: Any, *, swap: bool = False
    ) -> Value:
        """Return an elementwise node of this value and another one, or a number."""
        if not isinstance(other, Value):
            if not isinstance(other, int | float | np.ndarray | np.generic):
                raise TypeError(f"{self!r} combined with {type(other).__name__}")
            if isinstance(other, np.ndarray) and other.ndim:
                other = self.graph.weight(other)
            else:
                number = ops.constant(np.asarray(other, self.dtype))
                other = Value(self.graph, number.output(0), self.dtype, ())
        first, second = (other, self) if swap else (self, other)
        shape = np.broadcast_shapes(self.shape, other.shape)
        return self.made(node(first.output, second.output), shape)

    def __add__(self, other: Any) -> Value:
        return self.with_operand(ops.add, other)

    def __sub__(self, other: Any) -> Value:
        return self.with_operand(ops.subtract, other)

    def __rsub__(self, other: Any) -> Value:
        return self.with_operand(ops.subtract, other, swap=True)

    def __mul__(self, other: Any) -> Value:
        return self.with_operand(ops.multiply, other)

    __radd__, __rmul__ = __add__, __mul__

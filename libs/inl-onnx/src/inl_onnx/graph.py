"""An ONNX graph under construction, and its values.

A value behaves as a tensor of the contract: ``+ - *``, static slices, ``reshape``. The
functions of :mod:`inl_onnx.functions` do the rest. Shapes are static.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from inl.errors import DeviceError

OPSET = 21
"""Version of the ONNX operators."""

IR_VERSION = 10
"""Version of the file format that goes with :data:`OPSET`."""

CONTRIB = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""

DTYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "int32": onnx.TensorProto.INT32,
    "int64": onnx.TensorProto.INT64,
    "uint8": onnx.TensorProto.UINT8,
    "bool": onnx.TensorProto.BOOL,
}
"""Dtype name -> its number in ONNX."""

LAST = np.iinfo(np.int64).max


class Graph:
    """Nodes in order of computation, and the constants that they use."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[tuple[str, tuple[int, ...], bytes], Value] = {}
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: dict[str, Value] = {}

    def input(self, name: str, dtype: str, shape: tuple[int, ...]) -> Value:
        """Return a value that the caller of the graph gives."""
        value = Value(self, name, dtype, shape)
        self.inputs[name] = value
        return value

    def constant(self, data: Any, dtype: str = "") -> Value:
        """Return a constant; equal ones are stored once."""
        array = np.array(data, dtype or None, order="C", ndmin=0)
        key = array.dtype.name, array.shape, array.tobytes()
        if key not in self.constants:
            name = f"c{len(self.constants)}"
            self.initializers.append(numpy_helper.from_array(array, name))
            self.constants[key] = Value(self, name, array.dtype.name, array.shape)
        return self.constants[key]

    def add(
        self,
        op: str,
        inputs: Sequence[Value | None],
        results: Sequence[tuple[str, tuple[int, ...]]],
        *,
        domain: str = "",
        **attributes: Any,
    ) -> list[Value]:
        """Append a node; ``results`` are dtypes and shapes of its outputs."""
        start = len(self.nodes)
        values = [
            Value(self, f"n{start}_{index}", dtype, shape)
            for index, (dtype, shape) in enumerate(results)
        ]
        names = [value.name if value is not None else "" for value in inputs]
        outputs = [value.name for value in values]
        node = helper.make_node(op, names, outputs, domain=domain, **attributes)
        self.nodes.append(node)
        return values

    def model(self, outputs: Sequence[Value]) -> onnx.ModelProto:
        """Return the model with these outputs; inputs that no node uses are left out.

        Nodes that no output needs are left out as well.
        """
        needed, nodes = {value.name for value in outputs}, []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                needed.update(node.input)
                nodes.append(node)
        graph = helper.make_graph(
            nodes[::-1],
            "inl",
            [v.info() for v in self.inputs.values() if v.name in needed],
            [value.info() for value in outputs],
            [tensor for tensor in self.initializers if tensor.name in needed],
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


class Value:
    """A tensor in a graph: its name, dtype name and static shape."""

    __slots__ = ("dtype", "graph", "name", "shape")
    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # NumPy's operators leave the work to this class

    def __init__(
        self, graph: Graph, name: str, dtype: str, shape: tuple[int, ...]
    ) -> None:
        if dtype not in DTYPES:
            raise DeviceError(f"dtype: found {dtype!r}, ONNX takes {', '.join(DTYPES)}")
        self.graph, self.name, self.dtype = graph, name, dtype
        self.shape = tuple(int(size) for size in shape)

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def info(self) -> onnx.ValueInfoProto:
        """Return the declaration of an input or output."""
        return helper.make_tensor_value_info(self.name, DTYPES[self.dtype], self.shape)

    def node(
        self,
        op: str,
        *others: Any,
        dtype: str = "",
        shape: Sequence[int] | None = None,
        **attributes: Any,
    ) -> Value:
        """Return the only result of a node of which this is the first input."""
        result = dtype or self.dtype, tuple(self.shape if shape is None else shape)
        return self.graph.add(op, [self, *others], [result], **attributes)[0]

    def astype(self, dtype: str) -> Value:
        """Convert to a dtype; the value itself if it has it."""
        if dtype == self.dtype:
            return self
        return self.node("Cast", dtype=dtype, to=DTYPES[dtype])

    def reshape(self, *shape: Any) -> Value:
        """As NumPy's, with static sizes; one may be -1."""
        sizes = list(shape[0] if len(shape) == 1 and np.ndim(shape[0]) else shape)
        if -1 in sizes:
            known = -math.prod(sizes)
            sizes[sizes.index(-1)] = self.size // known if known else 0
        if math.prod(sizes) != self.size:
            raise ValueError(f"reshape: {self!r} to {sizes}")
        if tuple(sizes) == self.shape:
            return self
        target = self.graph.constant(sizes, "int64")
        return self.node("Reshape", target, shape=sizes, allowzero=1)

    def __getitem__(self, key: Any) -> Value:
        """Static slices with positive steps, integers, ``None`` and one ``...``."""
        keys = list(key if isinstance(key, tuple) else (key,))
        rest = self.ndim - sum(k is not None and k is not ... for k in keys)
        if ... not in keys:
            keys.append(...)
        at = keys.index(...)
        keys[at : at + 1] = [slice(None)] * rest
        starts, stops, axes, steps = [], [], [], []
        sliced, shape = list(self.shape), []
        axis = 0
        for each in keys:
            if each is None:
                shape.append(1)
                continue
            size = self.shape[axis]
            part = each if isinstance(each, slice) else slice(each, each + 1 or None)
            start, stop, step = part.indices(size)
            sliced[axis] = len(range(start, stop, step))
            if (start, stop, step) != (0, size, 1):
                starts.append(start)
                stops.append(stop)
                axes.append(axis)
                steps.append(step)
            if isinstance(each, slice):
                shape.append(sliced[axis])
            axis += 1
        result = self
        if axes:
            bounds = (self.graph.constant(x, "int64") for x in (starts, stops, axes))
            step_sizes = self.graph.constant(steps, "int64")
            result = self.node("Slice", *bounds, step_sizes, shape=sliced)
        return result.reshape(shape)

    def _with(self, op: str, other: Any, dtype: str = "", *, swap: bool = False) -> Any:
        if not isinstance(other, Value):
            other = self.graph.constant(other, self.dtype)
        if other.dtype != self.dtype:
            raise TypeError(f"{op}: dtypes differ: {self!r} and {other!r}")
        shape = np.broadcast_shapes(self.shape, other.shape)
        first, second = (other, self) if swap else (self, other)
        return first.node(op, second, dtype=dtype, shape=shape)

    def __add__(self, other: Any) -> Value:
        return self._with("Add", other)

    def __sub__(self, other: Any) -> Value:
        return self._with("Sub", other)

    def __rsub__(self, other: Any) -> Value:
        return self._with("Sub", other, swap=True)

    def __mul__(self, other: Any) -> Value:
        return self._with("Mul", other)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Any) -> Value:
        return self._with("Div", other)

    def __floordiv__(self, other: Any) -> Value:
        """Quotient of integers that are not negative."""
        return self._with("Div", other)

    def __rshift__(self, bits: int) -> Value:
        return self // (1 << bits)

    def __mod__(self, other: Any) -> Value:
        return self._with("Mod", other)

    def __lt__(self, other: Any) -> Value:
        return self._with("Less", other, "bool")

    def __le__(self, other: Any) -> Value:
        return self._with("LessOrEqual", other, "bool")

    def __gt__(self, other: Any) -> Value:
        return self._with("Greater", other, "bool")

    def __ge__(self, other: Any) -> Value:
        return self._with("GreaterOrEqual", other, "bool")

    def equal(self, other: Any) -> Value:
        """Elementwise equality."""
        return self._with("Equal", other, "bool")

    def __and__(self, other: Any) -> Value:
        return self._with("And" if self.dtype == "bool" else "BitwiseAnd", other)

    def __or__(self, other: Any) -> Value:
        return self._with("Or", other)

    def __invert__(self) -> Value:
        return self.node("Not")

    def __neg__(self) -> Value:
        return self.node("Neg")

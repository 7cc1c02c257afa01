"""The TFLite file of an int8 network: a flatbuffer, by LiteRT's own schema."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.errors import MissingPackage
from inl.install_command import install_command

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl_toolkit.nn.int8 import Grid, Int8Network

IDENTIFIER = b"TFL3"
SCHEMA = 3
LAYER_VERSION = 4
"""First version of FULLY_CONNECTED with int8 inputs and outputs."""


def write_file(network: Int8Network) -> bytes:
    """Return the file; raises :class:`~inl.errors.MissingPackage` without LiteRT."""
    try:
        schema = import_module("ai_edge_litert.schema_py_generated")
        flatbuffers = import_module("flatbuffers")
    except ImportError as error:
        raise MissingPackage(
            f"export_int8: {install_command('inl-toolkit[edge]')} (LiteRT)"
        ) from error
    builder = flatbuffers.Builder(1024)
    builder.Finish(_Writer(schema, network).model().Pack(builder), IDENTIFIER)
    return bytes(builder.Output())


class _Writer:
    """Collects tensors, buffers and operators."""

    def __init__(self, schema: Any, network: Int8Network) -> None:
        self.schema, self.network = schema, network
        self.tensors: list[Any] = []
        self.buffers: list[Any] = [schema.BufferT()]  # the first one is empty
        self.operators: list[Any] = []

    def model(self) -> Any:
        schema, network = self.schema, self.network
        width = network.layers[0].weight.shape[1]
        current = self._rows("input", width, network.source)
        for number, layer in enumerate(network.layers):
            before = network.layers[number - 1].output if number else network.source
            name = f"layer{number}"
            unit = layer.weight_scale * before.scale
            inputs = [
                current,
                self._tensor(
                    f"{name}/weight", layer.weight, schema.TensorType.INT8,
                    layer.weight_scale, 0,
                ),
                self._tensor(
                    f"{name}/bias", layer.bias, schema.TensorType.INT32, unit, 0
                ),
            ]  # fmt: skip
            current = self._rows(name, len(layer.weight), layer.output)
            self.operators.append(self._operator(inputs, current, layer.relu))
        graph = schema.SubGraphT()
        graph.name = "main"
        graph.tensors, graph.operators = self.tensors, self.operators
        graph.inputs, graph.outputs = [0], [current]
        code = schema.OperatorCodeT()
        code.builtinCode = schema.BuiltinOperator.FULLY_CONNECTED
        code.deprecatedBuiltinCode = code.builtinCode
        code.version = LAYER_VERSION
        model = schema.ModelT()
        model.version, model.description = SCHEMA, "INL"
        model.operatorCodes, model.subgraphs = [code], [graph]
        model.buffers = self.buffers
        return model

    def _rows(self, name: str, width: int, grid: Grid) -> int:
        """Add the tensor [batch, width] of an activation."""
        kind = self.schema.TensorType.INT8
        shape = (self.network.batch, width)
        return self._tensor(name, None, kind, grid.scale, grid.zero, shape)

    def _tensor(
        self,
        name: str,
        values: NDArray[Any] | None,
        kind: int,
        scale: float,
        zero: int,
        shape: tuple[int, ...] = (),
    ) -> int:
        tensor = self.schema.TensorT()
        tensor.name, tensor.type = name, kind
        tensor.shape = list(shape if values is None else values.shape)
        tensor.quantization = self.schema.QuantizationParametersT()
        tensor.quantization.scale, tensor.quantization.zeroPoint = [scale], [zero]
        tensor.buffer = 0
        if values is not None:
            held = self.schema.BufferT()
            held.data = np.frombuffer(values.astype(values.dtype).tobytes(), np.uint8)
            tensor.buffer = len(self.buffers)
            self.buffers.append(held)
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _operator(self, inputs: list[int], output: int, relu: bool) -> Any:
        schema, kinds = self.schema, self.schema.ActivationFunctionType
        operator = schema.OperatorT()
        operator.inputs, operator.outputs = inputs, [output]
        operator.builtinOptionsType = schema.BuiltinOptions.FullyConnectedOptions
        operator.builtinOptions = schema.FullyConnectedOptionsT()
        operator.builtinOptions.fusedActivationFunction = (
            kinds.RELU if relu else kinds.NONE
        )
        return operator

"""Exported functions in sessions of ONNX Runtime, with buffers bound to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx

from inl.errors import OutOfMemory
from inl.spec.tree import leaves, tree_map
from inl_onnx.tensors import Tensor
from inl_onnx.trace import Exported, Output

if TYPE_CHECKING:
    from inl_onnx.runtime import Runtime

NO_MEMORY = ("Failed to allocate memory", "bad_alloc", "OUTOFMEMORY", "out of memory")
"""Texts of ONNX Runtime's errors for a failed allocation."""


def is_oom(error: Exception) -> bool:
    """Return whether ONNX Runtime reports that memory is exhausted."""
    return any(text in str(error) for text in NO_MEMORY)


class CompiledProgram:
    """A program for arguments of fixed shapes.

    consumes: positions of the arguments whose tensors a call takes: their buffers are
    written in place where the graph allows it, and they cannot be read afterwards.
    constants: values of leaves of the arguments that become a part of the session.
    """

    def __init__(
        self,
        runtime: Runtime,
        exported: Exported,
        consumes: Sequence[int],
        *,
        constants: Mapping[int, Any],
        threads: int,
    ) -> None:
        self._runtime, self._consumes = runtime, tuple(consumes)
        self._outputs, self._tree = exported.outputs, exported.tree
        self._computed = [output for output in exported.outputs if output.name]
        names = [each.name for each in exported.model.graph.input]
        inputs = dict(zip(names, exported.inputs, strict=True))
        self._inputs = tuple(i for i in inputs.items() if i[1] not in constants)
        self._constants = dict(constants)
        self._bound: dict[str, Any] = {}
        if self._computed:
            fixed = {name: n for name, n in inputs.items() if n in constants}
            model = with_initializers(exported.model, fixed).SerializeToString()
            values = {name: constants[number] for name, number in fixed.items()}
            self._session = runtime.session(model, values, threads)
            self._binding = self._session.io_binding()

    def has(self, args: tuple[Any, ...]) -> bool:
        """Return whether the constants of the session are those of ``args``."""
        if not self._constants:
            return True
        tensors = list(leaves(args))
        found = self._constants.items()
        return all(tensors[number].value is value for number, value in found)

    def __call__(self, args: tuple[Any, ...]) -> Any:
        tensors: list[Tensor] = list(leaves(args))
        values = self._run(tensors) if self._computed else {}
        results = [self._result(output, tensors, values) for output in self._outputs]
        kept = {id(result) for result in results}
        for index in self._consumes:
            for leaf in leaves(args[index]):
                if id(leaf) not in kept:
                    leaf.consume()
        return tree_map(results.__getitem__, self._tree)

    def _run(self, tensors: list[Tensor]) -> dict[str, Any]:
        """Run the session; returns the values of its outputs by name."""
        for name, number in self._inputs:
            value = tensors[number].value
            if self._bound.get(name) is not value:
                self._binding.bind_ortvalue_input(name, value)
                self._bound[name] = value
        self._bind_outputs(tensors)
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            if is_oom(error):
                raise OutOfMemory(str(error).partition("\n")[0]) from error
            raise
        names = (output.name for output in self._computed)
        return dict(zip(names, self._binding.get_outputs(), strict=True))

    def _bind_outputs(self, tensors: list[Tensor]) -> None:
        """Bind outputs to the buffers of their arguments, or to new ones."""
        self._binding.clear_binding_outputs()
        provider = self._runtime.provider
        for output in self._computed:
            if self._shares(output, tensors):
                value = tensors[output.argument].value
                self._binding.bind_ortvalue_output(output.name, value)
            else:
                self._binding.bind_output(output.name, provider.memory, provider.number)

    def _shares(self, output: Output, tensors: list[Tensor]) -> bool:
        if not self._consumes or output.argument < 0:
            return False
        return self._runtime.provider.in_place and tensors[output.argument].in_place

    def _result(
        self, output: Output, tensors: list[Tensor], values: dict[str, Any]
    ) -> Tensor:
        if not output.name:
            return tensors[output.argument]
        in_place = output.argument >= 0 and tensors[output.argument].in_place
        shares = self._shares(output, tensors)
        value = tensors[output.argument].value if shares else values[output.name]
        shape = output.shape
        return Tensor(self._runtime, value, output.dtype, shape, in_place=in_place)


def with_initializers(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """Return the model with some inputs as initializers of external data."""
    names = set(names)
    if not names:
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    kept = [each for each in graph.input if each.name not in names]
    for each in graph.input:
        if each.name in names:
            kind = each.type.tensor_type
            tensor = graph.initializer.add(name=each.name, data_type=kind.elem_type)
            tensor.dims.extend(dim.dim_value for dim in kind.shape.dim)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="given")
    del graph.input[:]
    graph.input.extend(kept)
    return changed

"""Exported functions in sessions of ONNX Runtime, with buffers bound to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inl.errors import OutOfMemory
from inl.spec.tree import leaves, tree_map
from inl_onnx.tensors import Tensor
from inl_onnx.trace import Exported, Output

if TYPE_CHECKING:
    from inl_onnx.runtime import Runtime

NO_MEMORY = ("Failed to allocate memory", "bad_alloc", "OUTOFMEMORY", "out of memory")
"""Texts of ONNX Runtime's errors for a failed allocation."""


class CompiledProgram:
    """A program for arguments of fixed shapes.

    consumes: positions of the arguments whose tensors a call takes: their buffers are
    written in place where the graph allows it, and they cannot be read afterwards.
    """

    def __init__(
        self,
        runtime: Runtime,
        exported: Exported,
        consumes: Sequence[int],
        *,
        threads: int,
    ) -> None:
        self._runtime, self._consumes = runtime, tuple(consumes)
        self._outputs, self._tree = exported.outputs, exported.tree
        self._computed = [output for output in exported.outputs if output.name]
        names = [each.name for each in exported.model.graph.input]
        self._inputs = tuple(zip(names, exported.inputs, strict=True))
        self._bound: dict[str, Any] = {}
        if self._computed:
            model = exported.model.SerializeToString()
            self._session = runtime.session(model, threads)
            self._binding = self._session.io_binding()

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
            if any(text in str(error) for text in NO_MEMORY):
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

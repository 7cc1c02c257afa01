"""Tensors and programs on one device of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from inl.dtypes import HostArray, wrap
from inl.errors import DeviceError
from inl.spec.tree import leaves
from inl_onnx.graph import DTYPES
from inl_onnx.programs import CompiledProgram
from inl_onnx.tensors import Tensor
from inl_onnx.trace import export, signature


class Provider(NamedTuple):
    """An execution provider and the memory of its device."""

    name: str
    """Short name, such as "cpu"."""
    configure: Callable[[ort.SessionOptions], Sequence[Any]]
    """Adds the provider to the options of a session; returns the session's argument
    ``providers``."""
    memory: str = "cpu"
    """Device of an ``OrtValue``, as ONNX Runtime names it."""
    number: int = 0
    in_place: bool = True
    """Whether ``ScatterND`` copies nothing where input and output are one buffer."""


class Runtime:
    """One device: its tensors, and the programs compiled for it."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self._evaluated: dict[Any, CompiledProgram] = {}

    def tensor(
        self, data: HostArray, *, in_place: bool = False, constant: bool = False
    ) -> Tensor:
        """Copy a host array to the device."""
        if data.dtype not in DTYPES:
            raise DeviceError(
                f"dtype: found {data.dtype!r}, ONNX Runtime takes {', '.join(DTYPES)}"
            )
        array = np.ascontiguousarray(data.data.reshape(data.shape))
        value = self._aliased(array.copy()) if constant else self._copied(array)
        kinds = {"in_place": in_place, "constant": constant}
        return Tensor(self, value, data.dtype, data.shape, **kinds)

    def _aliased(self, array: Any) -> ort.OrtValue:
        """Return a value that refers to the array, if tensors are in host memory."""
        memory, index = self.provider.memory, self.provider.number
        return ort.OrtValue.ortvalue_from_numpy(array, memory, index)

    def _copied(self, array: Any) -> ort.OrtValue:
        if self.provider.memory != "cpu":
            return self._aliased(array)
        value = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype)
        if array.size:
            value.update_inplace(array)
        return value

    def zeros(
        self, shape: Sequence[int], dtype: str, *, in_place: bool = False
    ) -> Tensor:
        """Allocate a zeroed tensor."""
        return self.tensor(wrap(np.zeros(tuple(shape), dtype)), in_place=in_place)

    def numpy(self, x: Tensor) -> HostArray:
        """Copy a tensor to the host."""
        # A value in host memory returns a view of it.
        return wrap(x.value.numpy().reshape(x.shape).copy())

    def evaluate(
        self, function: Callable[..., Any], args: Any, static: dict[str, Any]
    ) -> Any:
        """Call a function of graph values on tensors; compiled once for its shapes."""
        key = function, signature(args), tuple(sorted(static.items()))
        if key not in self._evaluated:
            exported = export(function, args, static)
            program = CompiledProgram(self, exported, (), constants={}, threads=1)
            self._evaluated[key] = program
        return self._evaluated[key](args)

    def compile(
        self, function: Callable[..., Any], consumes: Sequence[int], *, fixed: bool
    ) -> Callable[..., Any]:
        """Return a program, exported when it is called.

        fixed: whether all calls have arguments of the same shapes; otherwise it is
        exported for each of them.
        """
        programs: dict[Any, CompiledProgram] = {}

        def run(*args: Any) -> Any:
            key = None if fixed else signature(args)
            program = programs.get(key)
            if program is None or not program.has(args):
                program = programs[key] = self._compiled(function, args, consumes)
            return program(args)

        return run

    def _compiled(
        self, function: Callable[..., Any], args: Any, consumes: Sequence[int]
    ) -> CompiledProgram:
        constants = {}
        if self.provider.memory == "cpu":
            found = enumerate(leaves(args))
            constants = {n: x.value for n, x in found if x.constant}
        exported = export(function, args, {})
        return CompiledProgram(self, exported, consumes, constants=constants, threads=0)

    def session(
        self, model: bytes, constants: Mapping[str, Any], threads: int
    ) -> ort.InferenceSession:
        """Return a session of a model on the device.

        constants: values of the initializers whose data are external, by name. threads:
        0 is one per core.
        """
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        if constants:
            options.add_external_initializers(list(constants), list(constants.values()))
        providers = list(self.provider.configure(options))
        return ort.InferenceSession(model, options, providers=providers)

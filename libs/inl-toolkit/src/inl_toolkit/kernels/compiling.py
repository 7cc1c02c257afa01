"""Compilation of decorated functions by XLA and torch."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any

import numpy as np

from inl.errors import KernelError

Function = Callable[..., Any]
Note = Callable[[str], None]
KEPT = 64
"""Most programs of a function that are kept, the last used ones."""
_numbers = itertools.count()


def compiled_by(
    framework: str, function: Function, *, has_structure: bool, note: Note
) -> Function:
    """Return ``function`` as a program of its own: of "jax" or "torch".

    has_structure: whether its arrays of integers say where blocks are, so that programs
    are made for their values. note: called with a sentence about the compilation.
    """
    own = _own_code(function)
    if framework == "jax":
        return XlaPrograms(own, function.__name__, has_structure, note)
    # Without the option, torch drops the rounding to float8.
    options = {"emulate_precision_casts": True}
    program: Function = import_module("torch").compile(own, options=options)
    return program


class XlaPrograms:
    """Programs of a function by the values of its arguments that are no arrays.

    Numbers, flags, names, lists of them and ``self`` select what the function computes,
    and are constants. Arrays have no values while XLA traces. For a function that reads
    some, those of integers become constants as well; if that does not help, it runs
    uncompiled.
    """

    def __init__(
        self, function: Function, name: str, has_structure: bool, note: Note
    ) -> None:
        self.function, self.name, self.note = function, name, note
        self.jax = import_module("jax")
        self.programs: OrderedDict[Any, Function] = OrderedDict()
        self.traces: list[Callable[[Any], bool]] = [_is_array, _is_no_structure]
        """Which arguments are traced, most first; the first that worked is kept."""
        if has_structure:
            del self.traces[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = self.jax.tree.flatten((args, kwargs))
        errors = self.jax.errors.JAXTypeError, self.jax.errors.JAXIndexError
        for at, is_traced in enumerate(self.traces):
            try:
                result = self._run(leaves, tree, is_traced)
            except errors:
                continue
            del self.traces[:at]
            return result
        try:
            result = self.function(*args, **kwargs)
        except errors as error:
            raise KernelError(
                f"{self.name}: reads values of arrays that JAX traces, "
                "which have none; accepted: a call outside of jax.jit, or these "
                "arguments as numbers, lists or NumPy arrays"
            ) from error
        if self.traces:
            self.traces.clear()
            self.note("runs uncompiled, since it reads values of its arrays")
        return result

    def _run(self, leaves: list[Any], tree: Any, is_traced: Any) -> Any:
        tracer = self.jax.core.Tracer
        traced = tuple(isinstance(x, tracer) or is_traced(x) for x in leaves)
        pairs = list(zip(leaves, traced, strict=True))
        constants = [None if skip else x for x, skip in pairs]
        key = tree, traced, tuple(map(_identity, constants))
        try:
            program = self.programs.pop(key, None)
        except TypeError:  # a constant has no hash
            self.note("runs uncompiled for arguments without a hash")
            return self._program(tree, constants, traced)(
                *(x for x, skip in pairs if skip)
            )
        program = program or self.jax.jit(self._program(tree, constants, traced))
        result = program(*(x for x, skip in pairs if skip))
        self.programs[key] = program
        if len(self.programs) > KEPT:
            self.programs.popitem(last=False)
            self.note(
                f"was compiled for more than {KEPT} values of its numbers; pass those "
                "that change as arrays"
            )
        return result

    def _program(
        self, tree: Any, constants: list[Any], traced: tuple[bool, ...]
    ) -> Function:
        def call(*arrays: Any) -> Any:
            rest = iter(arrays)
            pairs = zip(constants, traced, strict=True)
            leaves = [next(rest) if skip else value for value, skip in pairs]
            args, kwargs = self.jax.tree.unflatten(tree, leaves)
            return self.function(*args, **kwargs)

        return call


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and not isinstance(value, np.generic)


def is_structure(value: Any) -> bool:
    """Return whether a value is an array of integers or flags."""
    kind = str(getattr(value, "dtype", "")).rpartition(".")[2]
    return _is_array(value) and kind.startswith(("int", "uint", "bool"))


def _is_no_structure(value: Any) -> bool:
    return _is_array(value) and not is_structure(value)


def _identity(value: Any) -> Any:
    """Return a key of a constant, whose type counts: 1 is not True."""
    if _is_array(value):
        host = np.asarray(value)
        return type(value), host.dtype.str, host.shape, host.tobytes()
    if isinstance(value, float):
        return type(value), value.hex()  # 0.0 is not -0.0, and NaN is NaN
    return type(value), value


def _own_code(function: Function) -> Function:
    """Return a function that calls ``function``, with a code object of its own.

    JAX keeps programs by function, torch by code object, neither by configuration:
    kernels of one function would share a program.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    name = f"kernel_{next(_numbers)}"
    code = call.__code__.replace(co_name=name)
    return FunctionType(code, call.__globals__, name, None, call.__closure__)

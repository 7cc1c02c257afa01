"""Compilation of decorated functions by XLA and torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any

Function = Callable[..., Any]
_numbers = itertools.count()


def compiled_by(framework: str, function: Function) -> Function:
    """Return ``function`` as a program of its own: of "jax" or "torch"."""
    own = _own_code(function)
    program: Function
    if framework == "jax":
        program = _by_xla(own)
    else:
        # Without the option, torch drops the rounding to float8.
        options = {"emulate_precision_casts": True}
        program = import_module("torch").compile(own, options=options)
    return program


def _by_xla(function: Function) -> Function:
    """Compile with the arguments that are no arrays, numbers or trees as constants.

    They select what the function does, such as flags, names, and ``self``.
    """
    jax = import_module("jax")
    programs: dict[Any, Function] = {}

    def is_constant(value: Any) -> bool:
        array = hasattr(value, "shape") or isinstance(value, (int, float, complex))
        leaf = jax.tree_util.all_leaves([value])
        return isinstance(value, bool) or (leaf and not array)

    def call(*args: Any, **kwargs: Any) -> Any:
        numbers = tuple(i for i, each in enumerate(args) if is_constant(each))
        names = tuple(name for name, each in kwargs.items() if is_constant(each))
        key = numbers, names
        if key not in programs:
            programs[key] = jax.jit(
                function, static_argnums=numbers, static_argnames=names
            )
        return programs[key](*args, **kwargs)

    return call


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

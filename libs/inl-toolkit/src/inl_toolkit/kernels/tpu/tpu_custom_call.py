"""Kernels that are compiled ahead of time by XLA, and called by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, final

from inl.errors import KernelError, MissingPackage
from inl.install_command import install_command
from inl_toolkit.kernels.decorators import DecoratedKernel, tpu_kernel

_by_name: dict[str, Callable[..., Any]] = {}


@final
class CompiledKernel:
    """A function compiled for fixed shapes and dtypes on JAX's default device.

    Inside a program, and under the transformations of JAX, it is a part of that.
    """

    def __init__(
        self, name: str, traced: Any, inputs: Sequence[Any], platform: str, run: Any
    ) -> None:
        self.name, self.platform = name, platform
        self._traced, self._inputs, self._run = traced, inputs, run

    def __call__(self, *args: Any) -> Any:
        """Compute; raises :class:`KernelError` for other shapes or dtypes."""
        found = [
            (tuple(x.shape), str(x.dtype)) if hasattr(x, "dtype") else type(x).__name__
            for x in args
        ]
        wanted = [(tuple(x.shape), str(x.dtype)) for x in self._inputs]
        if found != wanted:
            raise KernelError(f"{self.name}: found {found}, accepted: {wanted}")
        tracer = import_module("jax").core.Tracer
        is_traced = any(isinstance(x, tracer) for x in args)
        return self._traced(*args) if is_traced else self._run(*args)


def compile_tpu_kernel(
    *,
    name: str,
    fn: Callable[..., Any],
    input_shapes: Sequence[tuple[int, ...]],
    output_shapes: Sequence[tuple[int, ...]],
    input_dtypes: Sequence[Any],
    output_dtypes: Sequence[Any],
) -> CompiledKernel:
    """Compile ``fn`` of JAX arrays for JAX's default device: a TPU where there is one.

    The kernel is also registered under ``name`` for :func:`tpu_custom_call`; its
    ``platform`` says what it was compiled for. Raises
    :class:`~inl.errors.MissingPackage` without JAX, and
    :class:`~inl.errors.KernelError` if the results of ``fn`` are not those declared.
    """
    try:
        jax = import_module("jax")
    except ImportError as error:
        raise MissingPackage(
            f"compile_tpu_kernel: {install_command('inl-tpu')}"
        ) from error
    inputs = _specs(jax, name, "input", input_shapes, input_dtypes)
    wanted = _specs(jax, name, "output", output_shapes, output_dtypes)
    traced = jax.jit(fn)
    lowered = traced.lower(*inputs)
    found = jax.tree.leaves(lowered.out_info)
    facts = [[(tuple(x.shape), str(x.dtype)) for x in each] for each in (found, wanted)]
    if facts[0] != facts[1]:
        raise KernelError(f"{name}: outputs: found {facts[0]}, declared: {facts[1]}")
    platform = jax.default_backend()
    kernel = CompiledKernel(name, traced, inputs, platform, lowered.compile())
    _by_name[name] = kernel
    return kernel


def tpu_custom_call(name: str, *args: Any) -> Any:
    """Call a kernel of :func:`compile_tpu_kernel` or :func:`register_tpu_op` by name.

    Raises :class:`~inl.errors.KernelError` for an unknown name.
    """
    if name not in _by_name:
        known = ", ".join(sorted(_by_name)) or "none"
        raise KernelError(f"tpu_custom_call: found {name!r:.80}, registered: {known}")
    return _by_name[name](*args)


def register_tpu_op(function: Callable[..., Any]) -> DecoratedKernel:
    """Register a function for :func:`tpu_custom_call` under its own name.

    Returns it as a :func:`~inl.kernels.tpu_kernel`.
    """
    kernel = tpu_kernel(function)
    _by_name[function.__name__] = kernel
    return kernel


def _specs(
    jax: Any, name: str, what: str, shapes: Sequence[Any], dtypes: Sequence[Any]
) -> list[Any]:
    if len(shapes) != len(dtypes):
        raise KernelError(
            f"{name}: found {len(shapes)} {what} shapes and {len(dtypes)} dtypes"
        )
    pairs = zip(shapes, dtypes, strict=True)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in pairs]

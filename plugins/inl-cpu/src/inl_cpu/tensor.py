"""Traced arrays: what a model computes with while a program is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from inl.errors import KernelFailed
from inl_cpu.instructions import Add, Mul, Scale, Sub

if TYPE_CHECKING:
    from inl_cpu.command_emitter import CommandEmitter

NATIVE = {np.add: Add, np.subtract: Sub, np.multiply: Mul}


class Tensor(NDArray[Any] if TYPE_CHECKING else np.ndarray):  # type: ignore[misc]
    """A view of scratch memory; arithmetic on it is recorded, not computed."""

    emitter: CommandEmitter

    def __array_finalize__(self, source: Any) -> None:
        if source is not None:
            self.emitter = getattr(source, "emitter", None)  # type: ignore[assignment]

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, **options: Any
    ) -> Any:
        if method != "__call__" or options:
            raise KernelFailed(
                f"{ufunc.__name__}: not supported on a tensor; use + - * or an op"
            )
        return record_ufunc(self.emitter, ufunc, inputs)

    def __array_function__(self, function: Any, *_: Any, **__: Any) -> Any:
        raise KernelFailed(f"{function.__name__}: not supported on a tensor; use an op")

    def reshape(self, *shape: Any, **_: Any) -> Any:
        """Return a view of another shape, or a recorded copy if strides forbid it."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        view = np.ndarray.reshape(self, sizes)
        if np.may_share_memory(plain(view), plain(self)):
            return view
        return np.ndarray.reshape(self.emitter.copied(self), sizes)


def plain(x: Any) -> Any:
    """View a tensor as an ordinary array, which NumPy computes with."""
    return x.view(np.ndarray) if isinstance(x, Tensor) else x


def record_ufunc(emitter: CommandEmitter, ufunc: Any, inputs: tuple[Any, ...]) -> Any:
    """Record ``ufunc``: as an instruction if shapes are equal, else as a NumPy step."""
    given = [plain(x) for x in inputs]
    shape = np.broadcast_shapes(*(np.shape(x) for x in given))
    out = emitter.new(shape, np.result_type(*given))
    if ufunc in NATIVE and all(_is_alike(x, out) for x in given):
        a, b = given
        emitter.emit(NATIVE[ufunc](count=out.size, a=a, b=b, y=out))
        return out
    scale = _as_scale(ufunc, given)
    if scale is not None and _is_alike(scale[0], out):
        x, factor, offset = scale
        emitter.emit(Scale(count=out.size, x=x, y=out, factor=factor, offset=offset))
        return out
    target = plain(out)
    arrays = [x for x in given if isinstance(x, np.ndarray)]
    emitter.python(lambda: ufunc(*given, out=target), arrays)
    return out


def _is_alike(x: Any, out: Any) -> bool:
    """Whether ``x`` is float32, contiguous and of the shape of ``out``."""
    same_shape = isinstance(x, np.ndarray) and x.shape == out.shape
    return same_shape and x.dtype == out.dtype == np.float32 and x.flags.c_contiguous


def _as_scale(ufunc: Any, given: list[Any]) -> tuple[Any, float, float] | None:
    """``(x, factor, offset)`` of an operation between an array and a number."""
    arrays = [x for x in given if isinstance(x, np.ndarray)]
    numbers = [x for x in given if not isinstance(x, np.ndarray)]
    if len(arrays) != 1 or len(numbers) != 1:
        return None
    number, array_first = float(numbers[0]), given[0] is arrays[0]
    if ufunc is np.multiply:
        return arrays[0], number, 0.0
    if ufunc is np.add:
        return arrays[0], 1.0, number
    if ufunc is np.subtract:
        factor, offset = (1.0, -number) if array_first else (-1.0, number)
        return arrays[0], factor, offset
    return None

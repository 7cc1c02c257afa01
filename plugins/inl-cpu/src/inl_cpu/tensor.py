"""Arrays of a program that is being recorded: shapes and places, no numbers yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from inl.errors import KernelFailed
from inl_cpu.abi import Opcode

if TYPE_CHECKING:
    from inl_cpu.command_emitter import Stage

NATIVE = {np.add: Opcode.ADD, np.subtract: Opcode.SUB, np.multiply: Opcode.MUL}


class Tensor(NDArray[Any] if TYPE_CHECKING else np.ndarray):  # type: ignore[misc]
    """A view of scratch memory: what a model does to it is recorded, not computed."""

    stage: Stage

    def __array_finalize__(self, source: Any) -> None:
        if source is not None:
            self.stage = getattr(source, "stage", None)  # type: ignore[assignment]

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, **options: Any
    ) -> Any:
        if method != "__call__" or options:
            raise KernelFailed(f"{ufunc.__name__}: not on a tensor; use + - * or an op")
        return record(self.stage, ufunc, inputs)

    def __array_function__(self, function: Any, *_: Any, **__: Any) -> Any:
        raise KernelFailed(f"{function.__name__}: not on a tensor; use an op")

    def reshape(self, *shape: Any, **_: Any) -> Any:
        """View with another shape; recorded as a copy where strides forbid a view."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        found = np.ndarray.reshape(self, sizes)
        if np.may_share_memory(plain(found), plain(self)):
            return found
        return np.ndarray.reshape(self.stage.copied(self), sizes)


def plain(x: Any) -> Any:
    """The same memory as an ordinary array, which NumPy computes with."""
    return x.view(np.ndarray) if isinstance(x, Tensor) else x


def record(stage: Stage, ufunc: Any, inputs: tuple[Any, ...]) -> Any:
    """Record ``ufunc``: natively where the shapes are equal, else by NumPy."""
    given = [plain(x) for x in inputs]
    shape = np.broadcast_shapes(*(np.shape(x) for x in given))
    out = stage.new(shape, np.result_type(*given))
    if ufunc in NATIVE and all(_even(x, out) for x in given):
        stage.emit(NATIVE[ufunc], [out.size], [*given, out])
        return out
    scale = _scale(ufunc, given)
    if scale is not None and _even(scale[0], out):
        stage.emit(Opcode.SCALE, [out.size], [scale[0], out], scale[1:])
        return out
    target = plain(out)
    arrays = [x for x in given if isinstance(x, np.ndarray)]
    stage.python(lambda: ufunc(*given, out=target), arrays)
    return out


def _even(x: Any, out: Any) -> bool:
    """Whether ``x`` is laid out as ``out`` is: float32, contiguous, of its shape."""
    fits = isinstance(x, np.ndarray) and x.shape == out.shape
    return fits and x.dtype == out.dtype == np.float32 and x.flags.c_contiguous


def _scale(ufunc: Any, given: list[Any]) -> tuple[Any, float, float] | None:
    """``(x, factor, offset)`` of an array combined with one number."""
    arrays = [x for x in given if isinstance(x, np.ndarray)]
    numbers = [x for x in given if not isinstance(x, np.ndarray)]
    if len(arrays) != 1 or len(numbers) != 1:
        return None
    number, first = float(numbers[0]), given[0] is arrays[0]
    if ufunc is np.multiply:
        return arrays[0], number, 0.0
    if ufunc is np.add:
        return arrays[0], 1.0, number
    if ufunc is np.subtract:
        return (arrays[0], 1.0, -number) if first else (arrays[0], -1.0, number)
    return None

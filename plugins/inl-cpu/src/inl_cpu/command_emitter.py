"""Where kernels put what they do: run at once, or recorded for a program."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from inl_cpu.abi import Opcode
from inl_cpu.memory import Scratch, Slab, empty
from inl_cpu.recording import Datum, Tape, make_call
from inl_cpu.tensor import Tensor, plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl_cpu.library import Machine
    from inl_cpu.matrix import Matrix
    from inl_cpu.weight_cache import Keeper


class Stage:
    """One backend's: its kernels allocate and emit here, in either mode."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.scratch = Scratch()
        self.weights = Slab(32 << 20)
        self.kept: Keeper | None = None
        """Where packed matrices come from or go to, while weights are loaded."""
        self.tape: Tape | None = None
        self.shared: WeakValueDictionary[Any, Matrix] = WeakValueDictionary()
        """Packed matrices by where in a mapped file they come from."""

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        """Record what kernels do instead of doing it."""
        assert self.tape is None, "programs are recorded one at a time"
        self.tape = Tape(self.scratch)
        try:
            yield self.tape
        finally:
            self.tape = None

    def new(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        """An array for a result; not filled."""
        if self.tape is None:
            return empty(shape, dtype)
        return self.lent(self.tape.arena.lend(shape, dtype))

    def lent(self, array: NDArray[Any]) -> Any:
        """An array as the model sees it while a program is recorded."""
        tensor: Any = array.view(Tensor)
        tensor.stage = self
        return tensor

    def emit(
        self,
        opcode: Opcode,
        dims: Sequence[int],
        data: Sequence[Datum],
        reals: Sequence[float] = (),
        flags: int = 0,
    ) -> None:
        """Run or record one instruction."""
        call = make_call(opcode, dims, data, reals, flags)
        if self.tape is not None:
            self.tape.call(call, data)
            return
        packed = ctypes.create_string_buffer(call.packed())
        self.machine.run(ctypes.addressof(packed), 1)

    def python(self, run: Callable[[], object], inputs: Sequence[Any]) -> None:
        """Run or record a computation of NumPy's that reads ``inputs``."""
        if self.tape is None:
            run()
        else:
            self.tape.python(run, inputs)

    def copied(self, x: NDArray[Any]) -> Any:
        """The same numbers in an array without strides."""
        out = self.new(x.shape, x.dtype)
        source, target = plain(x), plain(out)
        self.python(lambda: np.copyto(target, source), [source])
        return out

    def dense(self, x: Any) -> Any:
        """``x`` itself where its rows are contiguous float32, else a copy."""
        if x.flags.c_contiguous or (x.ndim > 1 and _rows_dense(x)):
            return x
        return self.copied(x)


def _rows_dense(x: NDArray[Any]) -> bool:
    """Whether all but the first axis are contiguous."""
    return bool(x.shape[0] and x[0].flags.c_contiguous)


def stride(x: NDArray[Any]) -> int:
    """Elements from one row to the next of an array whose rows are contiguous."""
    if x.shape[0] > 1:
        return x.strides[0] // x.itemsize
    return int(np.prod(x.shape[1:]))

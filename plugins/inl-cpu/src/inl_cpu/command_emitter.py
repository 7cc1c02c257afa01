"""Emits kernel instructions: runs them immediately or records them for a program."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from inl.forks import on_fork
from inl_cpu.encoding import Datum, Instruction
from inl_cpu.memory import Scratch, Slab, empty
from inl_cpu.recording import Recording
from inl_cpu.tensor import Tensor, plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl_cpu.library import Machine
    from inl_cpu.matrix import Matrix
    from inl_cpu.weight_cache import Cache


class CommandEmitter:
    """Allocates results and emits instructions for the kernels of one backend."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.scratch = Scratch()
        self.weights = Slab(32 << 20)
        self.weight_cache: Cache | None = None
        """Cache of packed matrices that is open while weights are loaded."""
        self.recording: Recording | None = None
        """The recording in progress; ``None`` while instructions run immediately."""
        self.shared: WeakValueDictionary[Any, Matrix] = WeakValueDictionary()
        """Packed matrices by their place in a mapped file, for tied weights."""
        on_fork(self)

    def after_fork_in_child(self) -> None:
        """Drop the recording of a thread that exists in the parent only."""
        self.recording = None

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record what kernels emit instead of running it."""
        assert self.recording is None, "programs are recorded one at a time"
        recording = Recording(self.scratch)
        try:
            self.recording = recording
            yield recording
        finally:
            self.recording = None

    def new(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        """Allocate an array for a result, not initialized."""
        if self.recording is None:
            return empty(shape, dtype)
        return self.traced(self.recording.buffers.allocate(shape, dtype))

    def traced(self, array: NDArray[Any]) -> Any:
        """View an array as a :class:`~inl_cpu.tensor.Tensor`, whose use is recorded."""
        tensor: Any = array.view(Tensor)
        tensor.emitter = self
        return tensor

    def emit(self, instruction: Instruction[Datum]) -> None:
        """Run or record one instruction; raises :class:`KernelFailed` if refused."""
        if self.recording is not None:
            self.recording.add_instruction(instruction)
            return
        run_now(self.machine, instruction)

    def python(self, run: Callable[[], object], inputs: Sequence[Any]) -> None:
        """Run or record a NumPy computation that reads ``inputs``."""
        if self.recording is None:
            run()
        else:
            self.recording.add_python(run, inputs)

    def copied(self, x: NDArray[Any]) -> Any:
        """Copy an array to a contiguous one."""
        out = self.new(x.shape, x.dtype)
        source, target = plain(x), plain(out)
        self.python(lambda: np.copyto(target, source), [source])
        return out

    def dense(self, x: Any) -> Any:
        """Return ``x`` if its rows are contiguous, else a copy."""
        if x.flags.c_contiguous or (x.ndim > 1 and _has_dense_rows(x)):
            return x
        return self.copied(x)


def run_now(machine: Machine, instruction: Instruction[Datum]) -> None:
    """Run one instruction; raises :class:`KernelFailed` if it is refused."""
    encoded = ctypes.create_string_buffer(instruction.resolved().encoded())
    machine.run(ctypes.addressof(encoded), 1)


def _has_dense_rows(x: NDArray[Any]) -> bool:
    """Whether all axes but the first are contiguous."""
    return bool(x.shape[0] and x[0].flags.c_contiguous)


def stride(x: NDArray[Any]) -> int:
    """Elements from one row to the next, of an array whose rows are contiguous."""
    if x.shape[0] > 1:
        return x.strides[0] // x.itemsize
    return int(np.prod(x.shape[1:]))

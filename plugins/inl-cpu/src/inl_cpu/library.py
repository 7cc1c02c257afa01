"""Finds and opens the native library; imports nothing heavy, for the probe asks too."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from inl.errors import DeviceError, KernelFailed
from inl_cpu.abi import ABI, ISAS, MatrixStruct
from inl_cpu.cores import count_threads

NAME: Final = "libinl.so"
PLACE: Final = Path(__file__).parent / "native" / NAME
ISA: Final = "INL_CPU_ISA"
"""Environment variable that forces an instruction set."""

Pool = ctypes.c_void_p


class Opened(NamedTuple):
    """The library, or why there is none."""

    library: ctypes.CDLL | None
    reason: str = ""


@cache
def open_library(place: Path = PLACE) -> Opened:
    """Load the library once; a reason instead of an error where that fails."""
    if not place.exists():
        return Opened(None, "the native library was not built (no C++ compiler?)")
    try:
        library = ctypes.CDLL(str(place))
        _declare(library)
    except (OSError, AttributeError) as error:
        return Opened(None, f"the native library cannot be loaded: {error}")
    found = f'"abi": {ABI},'.encode()
    if found not in library.inl_describe():
        return Opened(None, f"the native library is of another version than ABI {ABI}")
    return Opened(library)


def _declare(library: ctypes.CDLL) -> None:
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    matrix = ctypes.POINTER(MatrixStruct)
    signatures = {
        "inl_describe": (ctypes.c_char_p, ()),
        "inl_can_run": (i32, (i32,)),
        "inl_best_isa": (i32, ()),
        "inl_open": (pointer, (i32, i32)),
        "inl_close": (None, (pointer,)),
        "inl_threads": (i32, (pointer,)),
        "inl_run": (i64, (pointer, pointer, i64)),
        "inl_refusal": (ctypes.c_char_p, (pointer,)),
        "inl_packing": (i32, (i32, matrix)),
        "inl_matrix_bytes": (i64, (matrix,)),
        "inl_source_bytes": (i64, (i32, i64)),
        "inl_cache_bytes": (i64, (i64, i64, i64, i64, i32)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def chosen_isa(library: ctypes.CDLL) -> int:
    """Number of the instruction set to compute with.

    Raises :class:`DeviceError` where INL_CPU_ISA names none, or one that this
    processor lacks.
    """
    wanted = os.environ.get(ISA, "")
    if not wanted:
        return int(library.inl_best_isa())
    known = [name for n, name in enumerate(ISAS) if library.inl_can_run(n)]
    if wanted not in known:
        raise DeviceError(
            f"environment variable {ISA}: found {wanted!r:.80}, this processor runs "
            f"{', '.join(known)}"
        )
    return ISAS.index(wanted)


class Machine:
    """The library with its pool of threads: runs programs, one after the other."""

    def __init__(self, library: ctypes.CDLL, threads: int, isa: int) -> None:
        self.library = library
        self.threads, self.isa = threads, ISAS[isa]
        self._pool = library.inl_open(threads, isa)
        if not self._pool:
            raise DeviceError(f"native kernels: {threads} threads cannot be started")
        self._run = library.inl_run

    def run(self, address: int, count: int) -> None:
        """Run ``count`` instructions at ``address``; none runs if any is refused.

        Raises :class:`KernelFailed` with the instruction's number and the reason.
        """
        refused = self._run(self._pool, address, count)
        if refused:
            why = self.library.inl_refusal(self._pool).decode()
            raise KernelFailed(f"native program: instruction {refused}: {why}")


@cache
def _machine(threads: int, isa: int) -> Machine:
    library = open_library().library
    assert library is not None, "whoever asks for threads has the library"
    return Machine(library, threads, isa)


def open_machine() -> Machine:
    """The pool that all backends of this process share, as the environment wants it.

    Raises :class:`DeviceError` for odd variables or where there is no library.
    """
    found = open_library()
    if found.library is None:
        raise DeviceError(found.reason)
    return _machine(count_threads(), chosen_isa(found.library))

"""Loads the native library and opens its thread pool; imports no framework."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

from inl.errors import DeviceError, KernelFailed
from inl.forks import on_fork
from inl_cpu.abi import ABI, ISAS, MatrixStruct
from inl_cpu.cores import count_threads, requested_threads

NAMES: Final = {"win32": "libinl.dll", "darwin": "libinl.dylib"}
"""Name of the library by ``sys.platform``, ``libinl.so`` on others."""
LIBRARY_PATH: Final = (
    Path(__file__).parent / "native" / NAMES.get(sys.platform, "libinl.so")
)
COMMAND: Final = "inl build-kernels"
ISA: Final = "INL_CPU_ISA"
"""Environment variable that forces an instruction set."""


class LoadedLibrary(NamedTuple):
    """The native library, or the reason why there is none."""

    library: ctypes.CDLL | None
    reason: str = ""


@cache
def open_library(path: Path = LIBRARY_PATH) -> LoadedLibrary:
    """Load the library once; returns a reason instead of raising if that fails."""
    if not path.exists():
        return LoadedLibrary(None, f"the native library was not built; {advice()}")
    try:
        library = ctypes.CDLL(str(path))
        declare_signatures(library)
    except (OSError, AttributeError) as error:
        return LoadedLibrary(None, f"the native library cannot be loaded: {error}")
    if f'"abi": {ABI},'.encode() not in library.inl_describe():
        return LoadedLibrary(
            None,
            f"the native library has another ABI version than {ABI}; {advice()}",
        )
    if not library.inl_can_run(library.inl_best_isa()):
        return LoadedLibrary(
            None, f"none of its kernels run on this processor: {left_out(library)}"
        )
    return LoadedLibrary(library)


def advice() -> str:
    """Return what builds the library, or what that needs first."""
    from inl_cpu.build_native import why_no_compiler  # not needed with a library

    missing = why_no_compiler()
    return f"{missing}, and then: {COMMAND}" if missing else f"try: {COMMAND}"


def left_out(library: ctypes.CDLL) -> str:
    """What a build for one processor lacks, and what builds it; else nothing."""
    sets = json.loads(library.inl_describe())["left_out"]
    names = ", ".join(ISAS[number] for number in sets.values())
    return names and (
        f"the native library was built without {names}; try: {COMMAND} --all"
    )


def declare_signatures(library: ctypes.CDLL) -> None:
    """Set argument and result types; raises AttributeError for a missing function."""
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


def select_isa(library: ctypes.CDLL) -> int:
    """Number of the instruction set to use: INL_CPU_ISA, else the best available.

    Raises :class:`DeviceError` if INL_CPU_ISA names an unknown instruction set, or one
    that this processor or the library lacks.
    """
    requested = os.environ.get(ISA, "")
    if not requested:
        return int(library.inl_best_isa())
    available = [name for n, name in enumerate(ISAS) if library.inl_can_run(n)]
    if requested not in available:
        lacks = left_out(library)
        raise DeviceError(
            f"environment variable {ISA}: found {requested!r:.80}, this processor runs "
            f"{', '.join(available)}{lacks and '; ' + lacks}"
        )
    return ISAS.index(requested)


class Machine:
    """A thread pool of the library: runs programs, one after the other.

    A forked child starts its own threads when it first runs a program.
    """

    def __init__(self, library: ctypes.CDLL, threads: int, isa: int) -> None:
        self.library = library
        self.threads, self.isa = threads, ISAS[isa]
        self._run = library.inl_run
        self._opening = Lock()
        self._pool: int | None = None
        self._open()
        on_fork(self)

    def after_fork_in_child(self) -> None:
        """Leave the pool, whose threads only the parent has."""
        self._opening, self._pool = Lock(), None

    def _open(self) -> int:
        with self._opening:
            if not self._pool:
                self._pool = self.library.inl_open(self.threads, ISAS.index(self.isa))
            if not self._pool:
                raise DeviceError(
                    f"native kernels: cannot start {self.threads} threads"
                )
            return self._pool

    def run(self, address: int, count: int) -> None:
        """Run ``count`` encoded instructions; none runs if any is refused.

        Raises :class:`KernelFailed` with the instruction's number and the reason.
        """
        pool = self._pool or self._open()
        refused = self._run(pool, address, count)
        if refused:
            reason = self.library.inl_refusal(pool).decode()
            raise KernelFailed(f"native program: instruction {refused}: {reason}")


@cache
def _machine(threads: int, isa: int) -> Machine:
    library = open_library().library
    assert library is not None, "open_machine has checked the library"
    return Machine(library, threads, isa)


def open_machine(sharers: int = 1) -> Machine:
    """The pool that all backends of this process share.

    sharers: processes that compute at the same time, each on its part of the cores;
    INL_THREADS is the number of threads of each. Raises :class:`DeviceError` for
    invalid environment variables or if there is no library.
    """
    loaded = open_library()
    if loaded.library is None:
        raise DeviceError(loaded.reason)
    threads = requested_threads() or max(1, count_threads() // sharers)
    return _machine(threads, select_isa(loaded.library))


def open_single_threaded() -> Machine:
    """A pool of the calling thread only, for work beside the shared pool.

    Raises as :func:`open_machine` does.
    """
    machine = open_machine()
    return _machine(1, ISAS.index(machine.isa))

"""Compiles CUDA C++ by NVRTC and launches it, by NVIDIA's ``cuda.bindings``."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import torch
from cuda.bindings import driver, nvrtc

from inl.cache_dir.location import cache_folder
from inl.errors import DeviceError

OPTIONS: Final = ("--std=c++17", "-default-device")

POINTER: Final = ctypes.c_void_p

ATTRIBUTES: Final = driver.CUfunction_attribute
LAUNCH: Final = driver.CUlaunchAttributeID

SHARED_WITHOUT_ASKING: Final = 48 << 10
"""Bytes of shared memory that every kernel may have."""


def checked(result: Sequence[Any], what: str) -> Any:
    """Return the values of a call, or raise :class:`DeviceError`."""
    code, *values = result
    if code:
        raise DeviceError(f"{what}: {code.name} ({int(code)})")
    return values[0] if len(values) == 1 else values


@cache
def nvrtc_version() -> str:
    """Version of NVRTC. Raises :class:`DeviceError` where it cannot be loaded."""
    try:
        major, minor = checked(nvrtc.nvrtcVersion(), "NVRTC")
    except (RuntimeError, OSError, ImportError) as error:
        raise DeviceError(f"NVRTC cannot be loaded: {error}") from error
    return f"{major}.{minor}"


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a copy where it does not begin at a multiple of 16 bytes."""
    return x.clone() if x.data_ptr() % 16 else x


def compiled(source: str, options: tuple[str, ...], arch: str) -> bytes:
    """Return machine code for ``arch`` ("sm_90a"), from the cache on disk if there."""
    given = "\0".join((source, *options, *OPTIONS, arch, nvrtc_version()))
    name = hashlib.sha256(given.encode()).hexdigest()
    path = cache_folder() / "kernels" / f"{name}.cubin"
    if (code := read_checked(path)) is not None:
        return code
    code = compile_source(source, (*options, *OPTIONS, f"--gpu-architecture={arch}"))
    write_checked(path, code)
    return code


def compile_source(source: str, options: Sequence[str]) -> bytes:
    """Compile CUDA C++. Raises :class:`DeviceError` with the compiler's log."""
    program = checked(
        nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []), "NVRTC"
    )
    try:
        given = [one.encode() for one in options]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        if code:
            size = checked(nvrtc.nvrtcGetProgramLogSize(program), "NVRTC")
            log = b" " * int(size)
            checked(nvrtc.nvrtcGetProgramLog(program, log), "NVRTC")
            raise DeviceError(f"NVRTC with {' '.join(options)}: {log.decode():.2000}")
        binary = b" " * int(checked(nvrtc.nvrtcGetCUBINSize(program), "NVRTC"))
        checked(nvrtc.nvrtcGetCUBIN(program, binary), "NVRTC")
        return binary
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def read_checked(path: Path) -> bytes | None:
    """Read machine code that follows its digest; ``None`` if absent or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:32], data[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def write_checked(path: Path, code: bytes) -> None:
    """Write machine code behind its digest; a folder that cannot be written is fine."""
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(hashlib.sha256(code).digest() + code)
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()


class Function:
    """A kernel on one device, and how its arguments are passed."""

    def __init__(
        self, code: bytes, name: str, types: Sequence[Any], place: torch.device
    ) -> None:
        self._types = tuple(types)
        self._set: dict[Any, int] = {}
        self._has_room: bool | None = None
        with torch.cuda.device(place):
            torch.cuda.current_stream()  # makes the context current
            self._module = checked(driver.cuModuleLoadData(code), "cuModuleLoadData")
            self._function = checked(
                driver.cuModuleGetFunction(self._module, name.encode()), name
            )

    def allow_shared(self, size: int) -> None:
        """Allow programs of ``size`` bytes of shared memory.

        Multiprocessors are asked for all the shared memory that they have: kernels that
        ask for different sizes would not run beside each other.
        """
        self._allow(ATTRIBUTES.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
        if size > SHARED_WITHOUT_ASKING:
            limit = ATTRIBUTES.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._allow(limit, max(size, self._set.get(limit, 0)))

    def allow_cluster(self, programs: int, threads: int) -> bool:
        """Allow clusters of more than 8 programs; whether the chip has room for one."""
        self._allow(ATTRIBUTES.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        if self._has_room is None:
            config = launch_config(programs, threads, 0, cluster=programs, pdl=False)
            found = driver.cuOccupancyMaxActiveClusters(self._function, config)
            self._has_room = not found[0] and found[1] > 0
        return self._has_room

    def resident_clusters(
        self, programs: int, threads: int, shared: int, cluster: int
    ) -> int:
        """Return how many clusters of a launch run at the same time on an idle chip."""
        config = launch_config(programs, threads, shared, cluster=cluster, pdl=False)
        code, count = driver.cuOccupancyMaxActiveClusters(self._function, config)
        return 0 if code else int(count)

    def _allow(self, attribute: Any, value: int) -> None:
        if self._set.get(attribute) != value:
            result = driver.cuFuncSetAttribute(self._function, attribute, value)
            checked(result, f"{attribute.name} {value}")
            self._set[attribute] = value

    def launch(
        self, programs: int, threads: int, shared: int, arguments: Sequence[Any], *,
        cluster: int = 1, pdl: bool, cooperative: bool = False,
    ) -> None:  # fmt: skip
        """Launch on torch's current stream.

        cluster: programs that share memory. pdl: whether the kernel may start before
        the previous one ends. cooperative: whether all programs run at the same time,
        as they wait for each other.
        """
        config = launch_config(
            programs, threads, shared, cluster=cluster, pdl=pdl, cooperative=cooperative
        )
        given = tuple(arguments), self._types
        checked(driver.cuLaunchKernelEx(config, self._function, given, 0), "launch")


def launch_config(
    programs: int, threads: int, shared: int, *, cluster: int, pdl: bool,
    cooperative: bool = False,
) -> Any:  # fmt: skip
    """Return how a kernel is launched on torch's current stream."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = programs, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.hStream = torch.cuda.current_stream().cuda_stream
    attributes = []
    if pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = LAUNCH.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = LAUNCH.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
        attributes.append(attribute)
    if cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = LAUNCH.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def source_of(file: str) -> str:
    """Return CUDA C++ of this package, behind what all kernels share."""
    folder = files(__package__)
    return "".join(folder.joinpath(n).read_text() for n in ("numbers.cuh", file))


@cache
def function_of(
    file: str, name: str, types: tuple[Any, ...], options: tuple[tuple[str, Any], ...],
    place: torch.device,
) -> Function:  # fmt: skip
    """Return a kernel of a file of this package for these values of its constants."""
    return load_function(source_of(file), name, types, options, place)


def load_function(
    source: str, name: str, types: Sequence[Any],
    options: Sequence[tuple[str, Any]], place: torch.device,
) -> Function:  # fmt: skip
    """Compile a kernel of CUDA C++ for these values of its constants, and load it."""
    defined = tuple(f"-D{key}={value}" for key, value in options)
    major, minor = torch.cuda.get_device_capability(place)
    code = compiled(source, defined, f"sm_{major}{minor}a")
    return Function(code, name, types, place)

"""Parallel compilation of the Triton kernels of several programs.

Each program runs once on a dummy (padding-only) step with kernel launches suppressed:
new tensors read as zeros, and only slot 0 and block 0 are written. The suppressed
kernels are then compiled, linked and loaded by a thread pool, since the compiler rarely
holds the interpreter lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from inl.switch_interval import DEFAULT_SECONDS, switch_interval

ALIGNMENT: Final = 16
"""Triton specializes kernels on pointers and integers that are multiples of this."""

THREADS: Final = min(os.cpu_count() or 1, 16)

ZEROED: Final[dict[Any, Callable[..., Any]]] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}
"""Uninitialized allocations -> zeroed ones."""


class Launch(NamedTuple):
    """A suppressed kernel launch."""

    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


class _ZeroedAllocations(TorchFunctionMode):
    """Zeroes new tensors, which suppressed kernels leave unwritten."""

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return ZEROED.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def suppress_launches(launches: dict[Any, Launch]) -> Iterator[None]:
    """Suppress kernel launches of this thread, and record one of each specialization.

    launches: (kernel, specialization) -> launch; extended.
    """
    original, owner = JITFunction.run, threading.get_ident()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != owner:
            return original(self, *args, grid=grid, warmup=warmup, **options)
        keys = (
            _specialization(self, name, value)
            for name, value in (*zip(self.arg_names, args, strict=False),
                                *options.items())
        )  # fmt: skip
        key = (id(self), *keys)
        if key not in launches:
            metas = {name: _as_meta(value) for name, value in options.items()}
            launches[key] = Launch(self, tuple(map(_as_meta, args)), metas)
        return None

    JITFunction.run = run
    try:
        with _ZeroedAllocations():
            yield
    finally:
        JITFunction.run = original


def _specialization(function: Any, name: str, value: Any) -> Any:
    """The properties of an argument on which the compiled code depends."""
    if isinstance(value, torch.Tensor):
        return name, value.dtype, value.data_ptr() % ALIGNMENT == 0
    if isinstance(value, TensorDescriptor):
        return name, value.base.dtype, tuple(value.block_shape)
    index = function.arg_names.index(name) if name in function.arg_names else -1
    if type(value) is int and index >= 0 and index not in function.constexprs:
        return name, value == 1, value % ALIGNMENT == 0, value >= 1 << 31
    return name, value


def _as_meta(value: Any) -> Any:
    """Replace an aligned tensor by one without device memory."""
    if isinstance(value, torch.Tensor) and value.data_ptr() % ALIGNMENT == 0:
        return torch.empty(0, dtype=value.dtype, device="meta")
    if isinstance(value, TensorDescriptor):
        return replace(value, base=_as_meta(value.base))
    return value


def precompile(calls: Sequence[Callable[[], Any]], place: torch.device) -> int:
    """Compile the kernels that ``calls`` would launch; return their number.

    Each call computes a dummy step. Errors are ignored: the same call raises them again
    when it runs in earnest.
    """
    recorded: dict[Any, Launch] = {}
    for call in calls:
        try:
            with torch.inference_mode(), suppress_launches(recorded):
                call()
        except Exception:
            continue
    launches = list(recorded.values())

    def set_device() -> None:
        if place.type == "cuda":
            torch.cuda.set_device(place)

    # Loading a kernel is not safe with very frequent switches between threads.
    with (
        switch_interval(DEFAULT_SECONDS),
        ThreadPoolExecutor(THREADS, "inl-compile", set_device) as threads,
    ):
        for future in [threads.submit(_compile, launch) for launch in launches]:
            future.exception()
    return len(launches)


def _compile(launch: Launch) -> None:
    kernel = launch.function.run(*launch.args, grid=(1,), warmup=True, **launch.options)
    # Links the launcher and loads the code, so that the first launch need not.
    _ = kernel.run

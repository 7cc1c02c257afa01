"""Compiling the kernels of several programs side by side, before any of them runs.

Each program runs once on nobody, and launches no Triton kernel: what that would have
written reads as zeros, and slot 0 and block 0 are nobody's. What was left out is then
compiled, linked and loaded by threads, for the compiler seldom holds the interpreter.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

ALIGNED: Final = 16
"""Bytes, and sizes, that the compiler makes use of."""

THREADS: Final = min(os.cpu_count() or 1, 16)

ZEROED: Final[dict[Any, Callable[..., Any]]] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}


class Launch(NamedTuple):
    """A launch that was left out."""

    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


class _Zeroed(TorchFunctionMode):
    """Nothing writes to new tensors, so they must not hold what was there before."""

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return ZEROED.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def left_out(found: dict[Any, Launch]) -> Iterator[None]:
    """Launch no kernel from this thread, and keep one launch of each kind."""
    plain, owner = JITFunction.run, threading.get_ident()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != owner:
            return plain(self, *args, grid=grid, warmup=warmup, **options)
        kinds = (
            _kind(self, name, value)
            for name, value in (*zip(self.arg_names, args, strict=False),
                                *options.items())
        )  # fmt: skip
        key = (id(self), *kinds)
        if key not in found:
            kept = {name: _stand_in(value) for name, value in options.items()}
            found[key] = Launch(self, tuple(map(_stand_in, args)), kept)
        return None

    JITFunction.run = run
    try:
        with _Zeroed():
            yield
    finally:
        JITFunction.run = plain


def _kind(function: Any, name: str, value: Any) -> Any:
    """What of an argument the compiled code depends on."""
    if isinstance(value, torch.Tensor):
        return name, value.dtype, value.data_ptr() % ALIGNED == 0
    place = function.arg_names.index(name) if name in function.arg_names else -1
    if type(value) is int and place >= 0 and place not in function.constexprs:
        return name, value == 1, value % ALIGNED == 0, value >= 1 << 31
    return name, value


def _stand_in(value: Any) -> Any:
    """An argument that holds no memory of the device."""
    if isinstance(value, torch.Tensor) and value.data_ptr() % ALIGNED == 0:
        return torch.empty(0, dtype=value.dtype, device="meta")
    return value


def prepare(calls: Sequence[Callable[[], Any]], place: torch.device) -> int:
    """Compile what the calls would launch; return how many kernels that were.

    Each call computes a step of nobody. One that fails is left: it will fail again, and
    say why, when it is meant.
    """
    found: dict[Any, Launch] = {}
    for call in calls:
        try:
            with torch.inference_mode(), left_out(found):
                call()
        except Exception:
            continue
    launches = list(found.values())

    def enter() -> None:
        if place.type == "cuda":
            torch.cuda.set_device(place)

    with ThreadPoolExecutor(THREADS, "inl-compile", enter) as threads:
        for each in [threads.submit(_compiled, launch) for launch in launches]:
            each.exception()
    return len(launches)


def _compiled(launch: Launch) -> None:
    kernel = launch.function.run(*launch.args, grid=(1,), warmup=True, **launch.options)
    # Links the launcher and loads the code, which a first launch would wait for.
    _ = kernel.run

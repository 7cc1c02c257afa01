"""Launches of compiled kernels without what Triton does at every call.

Triton binds the arguments, inspects each and looks for the program that was compiled
for their kinds, which takes several times as long as the launch. A :class:`Launch`
looks for it by what programs depend on, and passes the arguments on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ALIGNMENT = 16
"""Bytes; programs differ by whether addresses are multiples of it."""

MAX_PROGRAMS = 1024
"""Most programs that one :class:`Launch` remembers."""


def _kind(argument: Any) -> Any:
    """Return what a program depends on."""
    if isinstance(argument, torch.Tensor):
        dtype = argument.dtype
        return (dtype,) if argument.data_ptr() % ALIGNMENT else dtype
    return float if type(argument) is float else argument


class Launch:
    """A kernel with its grid and compile-time constants.

    Called with the arguments before the constants, in the order of the kernel, of which
    the first is a tensor; each tensor is on the current device. Programs of Triton
    depend on the dtype and the alignment of tensors, on the value of integers and on
    the device. Where the kernel is interpreted, has hooks, or belongs to AMD's
    compiler, which inspects more, Triton launches it.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **constants: Any) -> None:
        self._kernel, self._constants = kernel, constants
        self._grid = (*grid, 1, 1)[:3]
        self._programs: dict[tuple[Any, ...], Callable[..., Any] | None] = {}

    def __call__(self, *args: Any) -> None:
        # Tensors of one call are on one device.
        key: tuple[Any, ...] = (args[0].get_device(), *map(_kind, args))
        launch = self._programs.get(key)
        if launch is not None:
            launch(*args)
            return
        program = self._kernel[self._grid](*args, **self._constants)
        if len(self._programs) >= MAX_PROGRAMS:
            self._programs.clear()
        self._programs[key] = self._bound(program, len(args))

    def _bound(self, program: Any, count: int) -> Callable[..., Any] | None:
        """Return what launches a compiled program, ``None`` where Triton has to."""
        is_compiled = program is not None and hasattr(program, "packed_metadata")
        if not is_compiled or torch.version.hip or self._kernel.pre_run_hooks:
            return None
        names = self._kernel.arg_names[count:]
        rest = tuple(self._constants[name] for name in names)
        run = program[self._grid]
        return lambda *args: run(*args, *rest)

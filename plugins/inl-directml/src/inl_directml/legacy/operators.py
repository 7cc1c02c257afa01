"""Check that a computation dispatches only operators that torch-directml has.

The wheel computes the others on the CPU, with copies to it and back.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from inl.errors import KernelFailed

NAMES = "native_operators.txt"


@cache
def native() -> frozenset[str]:
    """Return the operators that run on the device, as ``add.Tensor``.

    They have a kernel in torch-directml 0.2.5, or consist of operators that have one.
    """
    text = files(__package__).joinpath(NAMES).read_text("utf-8")
    return frozenset(text.split())


class NativeOnly(TorchDispatchMode):
    """Context in which an operator that the device lacks raises ``KernelFailed``."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        with self:
            # Composites that every device decomposes count as their parts.
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = func.name().removeprefix("aten::")
        if name not in native():
            raise KernelFailed(
                f"torch-directml has no kernel for {name} and would compute it on the "
                "CPU; a detour for it belongs in inl_directml.legacy.detours"
            )
        return func(*args, **kwargs)

"""Makes kernels of functions over graph values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inl.spec.kernel import Kernel
from inl.spec.tree import leaves
from inl_onnx.tensors import Tensor

TECHNOLOGY = "onnx"


class Exportable:
    """A function over graph values that may also be called with tensors.

    In a program it adds nodes to the graph; a call with tensors outside of one is
    exported by itself.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def __call__(self, *args: Any, **static: Any) -> Any:
        found = next((x for x in leaves(args) if isinstance(x, Tensor)), None)
        if found is None:
            return self.run(*args, **static)
        return found.runtime.evaluate(self.run, args, static)


def kernel(
    run: Callable[..., Any], op: str = "", technology: str = TECHNOLOGY, **more: Any
) -> Kernel:
    """Return the kernel of a function; its op has the function's name by default."""
    return Kernel(op or run.__name__, technology, Exportable(run), **more)

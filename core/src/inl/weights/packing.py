"""What ``pack`` functions share, see :attr:`inl.spec.kernel.Kernel.pack`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from inl.dtypes import HostArray
from inl.ops import catalog
from inl.spec.kernel import HostGroup
from inl.spec.op import Spec
from inl.spec.weights import in_layout
from inl.weights.load import to_dtype


def packer(
    op: str, layout: str, matrix: Callable[[HostArray, Any, str], Any]
) -> Callable[[HostGroup, Any, str], Any]:
    """Return a function that packs an op's matrices one by one.

    The function returns the op's tuple in ``layout``; vectors are converted to the
    compute dtype. matrix: (a tensor [..., N, K], backend, compute dtype) -> its packed
    form.
    """
    weights = in_layout(layout)(cast("type[tuple[Any, ...]]", catalog()[op].weights))

    def tensor(part: HostArray | None, backend: Any, dtype: str) -> Any:
        if part is None:
            return None
        if len(part.shape) > 1:
            return matrix(part, backend, dtype)
        return backend.tensor(to_dtype(part, dtype))

    def pack(group: HostGroup, backend: Any, dtype: str) -> Any:
        return weights(
            **{name: tensor(part, backend, dtype) for name, part in group.items()}
        )

    return pack


def present(part: HostArray | None) -> HostArray:
    """Return a tensor that is not optional."""
    assert part is not None, "the loader raises for a missing tensor"
    return part


def matrices(stored: dict[str, Spec]) -> dict[str, Spec]:
    """Return the matrices among the stored specs of a group."""
    return {name: spec for name, spec in stored.items() if len(spec.shape) > 1}


def refuse_dtypes(*accepted: str) -> Callable[..., str | None]:
    """Return a ``Kernel.can_pack`` that accepts matrices of some stored dtypes."""

    def refuse(**stored: Spec) -> str | None:
        for name, spec in matrices(stored).items():
            if spec.dtype not in accepted:
                return f"{name} is stored as {spec.dtype}, not as {', '.join(accepted)}"
        return None

    return refuse

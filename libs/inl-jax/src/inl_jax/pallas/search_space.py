"""Block sizes of the Pallas kernels that ``inl tune`` measures on a TPU.

Packed products have theirs from :mod:`inl_jax.pallas.block_sizes` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inl.errors import RequestError
from inl.spec.kernel import Kernel
from inl.spec.selection import layout_of
from inl.spec.workload import Config
from inl_jax.pallas import experts, paged_attention

AXES: Mapping[str, Sequence[Config]] = {
    "attention": [{"keys": size} for size in (128, 256, 512, 1024)],
    "expert_linear": [{"bytes": size << 20} for size in (1, 2, 4, 8)],
}
"""Op -> configs of its kernel for decoding rows."""


def search_space(
    op: str, specs: tuple[Any, ...], attrs: Mapping[str, Any]
) -> Sequence[Sequence[Config]]:
    """Return the configs to try for a call; empty where the kernel refuses it."""
    if op not in AXES or kernel(op, {}).refuse(*specs, **attrs):
        return ()
    if op == "expert_linear" and layout_of(specs[2]) != kernel(op, {}).layout:
        return ()
    return [AXES[op]]


def kernel(op: str, config: Config, interpret: Any = False) -> Kernel:
    """Return the Pallas kernel of an op with block sizes.

    interpret: simulates it on the CPU. Raises :class:`~inl.errors.RequestError` for
    an op or sizes that are not among :data:`AXES`.
    """
    makers: dict[str, Callable[[], Kernel]] = {
        "attention": lambda: paged_attention.kernel(interpret, config),
        "expert_linear": lambda: next(iter(experts.kernels(interpret, config))),
    }
    if op not in makers:
        raise RequestError(f"{op}: found no block sizes to tune, accepted: {[*makers]}")
    if config and config not in AXES[op]:
        raise RequestError(f"{op}: found {dict(config)}, accepted: {AXES[op]}")
    return makers[op]()

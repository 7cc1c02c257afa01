"""Pallas kernels for TPUs, which a backend prefers to those of XLA where they fit."""

from __future__ import annotations

from collections.abc import Iterable

from inl.spec.kernel import Kernel


def kernels() -> Iterable[Kernel]:
    """List the kernels; imports Pallas."""
    from inl_jax.pallas import linear, paged_attention

    yield paged_attention.kernel()
    yield from linear.kernels()

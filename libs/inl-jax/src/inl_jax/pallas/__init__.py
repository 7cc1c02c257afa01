"""Pallas kernels for TPUs, which a backend prefers to those of XLA where they fit."""

from __future__ import annotations

from collections.abc import Iterable

from inl.spec.kernel import Kernel


def kernels() -> Iterable[Kernel]:
    """List the kernels; imports Pallas."""
    from inl_jax.pallas import (
        dense,
        experts,
        gated,
        linear,
        paged_attention,
        rope,
        rows,
        write_kv,
    )

    yield write_kv.kernel()
    yield paged_attention.kernel()
    yield from linear.kernels()
    yield dense.kernel()
    yield gated.kernel()
    yield rope.kernel()
    yield from experts.kernels()
    yield from rows.kernels()

"""Tuning of a decorated kernel's configuration, by measured time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from inl.errors import InlError, RequestError


class Trial(NamedTuple):
    """One configuration that was tried."""

    fields: Mapping[str, Any]
    """Fields that differ from those before."""
    seconds: float | None
    """Median of the calls; ``None`` if it was rejected."""
    error: float
    """Largest difference of its result, relative to the largest magnitude."""
    rejected: str = ""
    """Why it was rejected."""


class AutotuneResult(NamedTuple):
    """What :func:`autotune` measured and applied; the first trial is the old one."""

    trials: tuple[Trial, ...]
    best: Trial


def autotune(
    kernel: Any,
    *args: Any,
    search: Mapping[str, Sequence[Any]],
    tolerance: float = 1e-3,
    repeat: int = 5,
) -> AutotuneResult:
    """Time a kernel of ``inl.kernels`` with each configuration; keep the fastest.

    kernel: made by ``tpu_kernel``, ``gpu_kernel`` or ``cpu_kernel``; its configuration
    is replaced. args: of its call. search: values to try, by field of ``KernelConfig``;
    all combinations are tried. tolerance: largest difference from the results of the
    configuration before, relative to their largest magnitude; another is rejected.
    Kernels of language models are tuned by ``inl tune``. Raises
    :class:`~inl.errors.RequestError` for another kind of function.
    """
    if not hasattr(kernel, "configure") or not search:
        raise RequestError(
            f"autotune: found {type(kernel).__name__:.80} and fields "
            f"{list(search)}, accepted: a kernel of inl.kernels, and at least one field"
        )
    before = kernel.config
    exact = _host(kernel(*args))
    combinations = [
        dict(zip(search, each, strict=True)) for each in product(*search.values())
    ]
    best = before
    try:
        trials = [
            _tried(kernel, args, before, fields, exact, tolerance, repeat)
            for fields in ({}, *combinations)
        ]
        fastest = min(trials, key=lambda t: np.inf if t.seconds is None else t.seconds)
        best = replace(before, **fastest.fields)
    finally:
        kernel.configure(best)
    return AutotuneResult(tuple(trials), fastest)


def _tried(
    kernel: Any,
    args: tuple[Any, ...],
    before: Any,
    fields: Mapping[str, Any],
    exact: list[Any],
    tolerance: float,
    repeat: int,
) -> Trial:
    try:
        kernel.configure(replace(before, **fields))
        error = _error(_host(kernel(*args)), exact)
    except (InlError, TypeError) as failure:
        return Trial(fields, None, np.inf, str(failure))
    if not error <= tolerance:
        return Trial(fields, None, error, f"differs by {error:.2g}")
    times = []
    for _ in range(repeat):
        start = perf_counter()
        _host(kernel(*args))
        times.append(perf_counter() - start)
    return Trial(fields, sorted(times)[repeat // 2], error)


def _host(result: Any) -> list[Any]:
    """Wait for results and copy them to the host."""
    leaves = result if isinstance(result, (tuple, list)) else (result,)
    return [
        np.asarray(each.detach().cpu() if hasattr(each, "detach") else each, np.float64)
        for each in leaves
    ]


def _error(found: list[Any], exact: list[Any]) -> float:
    pairs = list(zip(found, exact, strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    return max(
        float(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30))
        for a, b in pairs
    )

"""Capability card: summary of a backend's check results as JSON."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import inl
from inl.plugin import CONTRACT, registry
from inl.testing.findings import findings
from inl.testing.invariant_checks import INVARIANT, missing_kernels
from inl.testing.op_call import OpCall

if TYPE_CHECKING:
    from inl.spec.op import OpSpec
    from inl.testing.check import Result
    from inl.testing.target import Target

FRAMEWORKS = ("torch", "jax", "triton", "numpy")
"""Packages whose versions the card lists if they are imported."""


def capability_card(
    target: Target, results: Sequence[Result], seconds: float
) -> dict[str, Any]:
    """Return the card as JSON values.

    seconds: duration of all checks. Raises what opening the device raises.
    """
    backend = target.backend
    return {
        "device": str(target.device),
        "name": _device_name(target),
        "passed": all(result.status != "failed" for result in results),
        "contract": list(CONTRACT),
        "versions": _versions(target),
        "seed": target.seed,
        "full": target.full,
        "seconds": round(seconds, 3),
        "dtypes": list(backend.traits.dtypes),
        "block_size": backend.traits.block_size,
        "depth": backend.traits.depth,
        "invariant": certified(results),
        "invariant_missing": missing_kernels(target),
        "sections": {name: _counts(mine) for name, mine in by_section(results).items()},
        "ops": {
            name: _op(target, spec, results)
            for name, spec in sorted(target.ops.items())
        },
        "findings": [list(finding.lines()) for finding in findings(results)],
        "failures": [
            {"check": result.name, "message": result.message}
            for result in results
            if result.status == "failed"
        ],
        "gaps": {r.name: r.message for r in results if r.status == "gap"},
    }


def by_section(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Group results by section, in order."""
    sections: dict[str, list[Result]] = {}
    for result in results:
        sections.setdefault(result.section, []).append(result)
    return sections


def how_computed(target: Target, spec: OpSpec) -> list[str]:
    """Return how the cases of an op are computed: native, composed, hosted, missing."""
    cases = spec.cases(target.rng(spec.name, 0))
    dtypes = target.dtypes
    ways = {
        OpCall(target, spec, case, dtype).choice().how
        for case in cases
        for dtype in dtypes
    }
    return sorted(ways)


def worst_ratio(results: Sequence[Result]) -> float | None:
    """Return the largest ratio of error to bound, rounded to 4 digits.

    ``None`` if nothing was measured, or a result that has to be exact was not.
    """
    ratios = [result.measure.ratio for result in results if result.measure]
    return round(max(ratios), 4) if ratios and max(ratios) < math.inf else None


def _op(target: Target, spec: OpSpec, results: Sequence[Result]) -> dict[str, Any]:
    mine = [
        result
        for result in results
        if result.section == "kernel" and result.name.startswith(f"{spec.name}/")
    ]
    kernels = [kernel for kernel in target.selection.kernels if kernel.op == spec.name]
    return {
        "how": how_computed(target, spec),
        "kernels": [kernel.name for kernel in kernels],
        "invariant": any(kernel.invariant for kernel in kernels),
        **_counts(mine),
        "worst_ratio": worst_ratio(mine),
    }


def _counts(results: Sequence[Result]) -> dict[str, Any]:
    counts = {"passed": 0, "failed": 0, "gap": 0}
    for result in results:
        counts[result.status] += 1
    return counts


def certified(results: Sequence[Result]) -> list[str]:
    """Return the dtypes in which the check of the invariant mode has passed."""
    parts = [
        (result.name.rpartition("/"), result.status == "passed") for result in results
    ]
    return [dtype for (name, _, dtype), passed in parts if passed and name == INVARIANT]


def _device_name(target: Target) -> str | None:
    for info in registry().find(target.device.type).devices:
        if info.index == target.device.index:
            return info.name
    return None


def _versions(target: Target) -> dict[str, str]:
    versions = {"inl": inl.__version__, "python": sys.version.split()[0]}
    entry = registry().backend(target.device.type)
    if entry is not None:
        versions["plugin"] = entry.origin.package
    for name in FRAMEWORKS:
        if name in sys.modules:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                continue
    return versions

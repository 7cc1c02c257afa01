"""All promises of a backend together: what ``inl check`` and the contracts run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from inl.testing.backend_checks import backend_checks
from inl.testing.check import Check, Result, perform
from inl.testing.engine_checks import engine_checks
from inl.testing.kernel_checks import kernel_checks
from inl.testing.runner_checks import runner_checks

if TYPE_CHECKING:
    from inl.testing.target import Target

SECTIONS: Mapping[str, Callable[[Target], Iterator[Check]]] = {
    "backend": backend_checks,
    "kernel": kernel_checks,
    "runner": runner_checks,
    "engine": engine_checks,
}
"""One contract each, from the smallest promise to the largest."""


def checks_of(target: Target, sections: Iterable[str] = SECTIONS) -> list[Check]:
    """List the checks of some sections.

    Where the device cannot be opened, each section is one check that says why.
    """
    try:
        assert target.selection, "opening the device lists its kernels"
    # Whatever a stranger's module raises, the report must say it.
    except Exception as error:
        return [
            Check(section, f"{section}/opens", partial(_again, error))
            for section in sections
        ]
    return [check for section in sections for check in SECTIONS[section](target)]


def _again(error: Exception) -> None:
    raise error


def check_all(
    target: Target,
    *,
    gaps: Mapping[str, str] | None = None,
    told: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Run every check in order; ``told`` hears of each result at once."""
    results = []
    for check in checks_of(target):
        result = perform(check, gaps or {})
        if told is not None:
            told(result)
        results.append(result)
    return results

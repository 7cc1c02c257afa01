"""All conformance checks of a backend, run by ``inl check`` and the contracts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from inl.errors import RequestError
from inl.testing.backend_checks import backend_checks
from inl.testing.block_checks import block_checks
from inl.testing.check import Check, Result, check_gaps, gap_of, perform
from inl.testing.engine_checks import engine_checks
from inl.testing.feature_checks import feature_checks
from inl.testing.kernel_checks import kernel_checks
from inl.testing.model_cases import model_checks
from inl.testing.rank_checks import rank_checks
from inl.testing.runner_checks import runner_checks

if TYPE_CHECKING:
    from inl.testing.target import Target

SECTIONS: Mapping[str, Callable[[Target], Iterator[Check]]] = {
    "backend": backend_checks,
    "kernel": kernel_checks,
    "runner": runner_checks,
    "blocks": block_checks,
    "engine": engine_checks,
    "feature": feature_checks,
    "ranks": rank_checks,
    "model": model_checks,
}
"""Checks by section; each but the last, which needs a model, has a contract class."""


def checks_of(target: Target, sections: Iterable[str] = SECTIONS) -> list[Check]:
    """Return the checks of some sections.

    If the device cannot be opened, each section is one check that fails with the error.
    """
    try:
        assert target.selection, "opening the device lists its kernels"
    # A third-party backend may raise any exception; the report shows it.
    except Exception as error:
        return [
            Check(section, f"{section}/opens", partial(_raise, error))
            for section in sections
        ]
    return [check for section in sections for check in SECTIONS[section](target)]


def _raise(error: Exception) -> None:
    raise error


def check_all(
    target: Target,
    *,
    gaps: Mapping[str, str] | None = None,
    on_result: Callable[[Result], None] | None = None,
    names: Sequence[str] = (),
) -> list[Result]:
    """Run every check in order; of a target with ``only`` those of its kernels.

    gaps: check names, or their first parts, mapped to reasons. on_result: called after
    each check. names: sections, and names, or their first parts, of the checks to run;
    none for all.
    Raises :class:`RequestError` for names or gaps that cover no check.
    """
    results = []
    sections = ("kernel", "model") if target.only else SECTIONS
    checks = checks_of(target, sections)
    check_gaps(gaps or {}, [check.name for check in checks])
    wanted = dict.fromkeys(names, "is wanted")
    for name in names:
        if not any(_is_named(check, {name: ""}) for check in checks):
            firsts = dict.fromkeys(check.name.partition("/")[0] for check in checks)
            raise RequestError(
                f"no check is named {name!r}; accepted: a section of "
                f"{', '.join(SECTIONS)}; a check's name, or its first parts, of "
                f"{', '.join(firsts)}"
            )
    for check in checks:
        if names and not _is_named(check, wanted):
            continue
        result = perform(check, gaps or {})
        if on_result is not None:
            on_result(result)
        results.append(result)
    return results


def _is_named(check: Check, names: Mapping[str, str]) -> bool:
    return check.section in names or gap_of(check.name, names) is not None

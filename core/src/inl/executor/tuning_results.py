"""Applies the tuning file to kernel selection on one device."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from inl.backend.tunable import Tunable
from inl.errors import InlError
from inl.spec.workload import TuningResults, frozen

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.executor.tuning_record import Quarantined, Record


def load_tuning_results(backend: Backend) -> TuningResults:
    """Return the results of ``inl tune`` for the device and versions of ``backend``.

    A file that cannot be used is logged as a warning, since kernels work without it.
    """
    tunable = backend.offers(Tunable)  # type: ignore[type-abstract]
    if tunable is None:
        return TuningResults()
    from inl.executor.tuning_file import read, tuning_file

    path = tuning_file()
    try:
        return applied(read(path), tunable)
    except InlError as error:
        _warn(f"{error}; ignored, `inl tune --clear` removes it")
        return TuningResults()


def applied(record: Record, tunable: Tunable) -> TuningResults:
    """Return the kernels and quarantined configurations of a record for one device."""
    if not record:
        return TuningResults()
    facts = tunable.facts()
    winners = {}
    for entry in record.measured.values():
        if entry.facts == facts and entry.config:
            try:
                kernel = tunable.kernel(entry.work.op, entry.config)
            except InlError as error:
                _warn(f"tuning of {entry.work.op}: {error}; ignored")
                continue
            winners[entry.work] = kernel
    quarantined = {
        (entry.work, entry.kernel, frozen(entry.config)): sentence(entry)
        for entry in record.quarantined.values()
        if entry.facts == facts
    }
    return TuningResults(winners, quarantined)


def sentence(entry: Quarantined) -> str:
    """Return the reason for which a configuration is not selected."""
    return f"quarantined by inl tune on {entry.when}: {entry.reason}"


@cache
def _warn(message: str) -> None:
    """Log each message once per process."""
    logging.getLogger("inl").warning(message)

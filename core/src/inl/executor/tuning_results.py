"""What this device's measurements say to the choice of kernels."""

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
    """What ``inl tune`` found on the device of ``backend``, with these versions.

    A file that cannot be used is one line of log and never an error: it makes nothing
    wrong, only slower.
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


def applied(found: Record, tunable: Tunable) -> TuningResults:
    """Those entries of a record that hold for a device, made into kernels."""
    if not found:
        return TuningResults()
    facts = tunable.facts()
    winners = {}
    for entry in found.measured.values():
        if entry.facts == facts and entry.config:
            try:
                kernel = tunable.kernel(entry.work.op, entry.config)
            except InlError as error:
                _warn(f"tuning of {entry.work.op}: {error}; ignored")
                continue
            winners[entry.work] = kernel
    barred = {
        (entry.work, entry.kernel, frozen(entry.config)): sentence(entry)
        for entry in found.quarantined.values()
        if entry.facts == facts
    }
    return TuningResults(winners, barred)


def sentence(entry: Quarantined) -> str:
    """Why a way is not taken."""
    return f"quarantined by inl tune on {entry.when}: {entry.reason}"


@cache
def _warn(message: str) -> None:
    """Log each message once in the life of the process."""
    logging.getLogger("inl").warning(message)

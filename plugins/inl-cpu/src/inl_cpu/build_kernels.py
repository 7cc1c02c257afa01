"""``inl build-kernels`` of this package: the native library, built where it belongs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from inl.errors import BackendUnavailable
from inl_cpu import build_native as native


def build_kernels(*, every: bool = False, report: native.Report | None = None) -> Path:
    """Build the library for this processor, or for ``every`` one of its architecture.

    report: see :data:`~inl_cpu.build_native.Report`; ``None`` prints a line for each
    file. Raises :class:`BackendUnavailable` without a compiler, if it fails, or if the
    package's folder cannot be written.
    """
    if reason := native.why_no_compiler():
        raise BackendUnavailable(reason)
    build = native.build if every else native.build_for_host
    try:
        return build(objects=native.OBJECTS, report=report or native.show_progress)
    except OSError as error:
        raise BackendUnavailable(
            f"cannot write {native.LIBRARY}: {error.strerror}; run the command as the "
            "user who installed inl-cpu"
        ) from error
    except subprocess.CalledProcessError as error:
        raise BackendUnavailable(
            f"the compiler, {error.cmd[0]}, failed with status {error.returncode}; its "
            "errors are above"
        ) from error

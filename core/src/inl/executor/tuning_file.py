"""The tuning file: stores measurements of kernels, shared between processes.

A writer takes a lock, reads the file, merges, and replaces it atomically, so that a
reader sees the old content or the new.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from inl.cache_dir.location import cache_folder
from inl.errors import RequestError
from inl.executor.tuning_record import Record, dump, parse
from inl.file_lock import locked

NAME = "tuning.json"
MAX_BYTES = 16 << 20
"""Largest file that is read; a measurement takes a few hundred bytes."""


def tuning_file() -> Path:
    """Return the path of the user's tuning file."""
    return cache_folder() / NAME


def read(path: Path) -> Record:
    """Read a file; a missing file is an empty record.

    Raises :class:`~inl.errors.RequestError` for a file that is damaged, too large,
    unreadable or of another format.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Record()
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise RequestError(f"{path}: larger than {MAX_BYTES} bytes, not a tuning file")
    return parse(data, str(path))


def write(path: Path, record: Record) -> None:
    """Replace a file atomically; raises :class:`~inl.errors.RequestError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(dump(record))
            Path(name).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None


def update(path: Path, change: Callable[[Record], Record]) -> Record:
    """Read, change and replace a file under a lock; returns the new record.

    Raises :class:`~inl.errors.RequestError` for a damaged file, which stays unchanged.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f"{path.name}.lock")):
            record = change(read(path))
            write(path, record)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    return record

"""The file in which measurements of kernels are kept, shared by many processes.

A writer holds a lock, reads what is there, merges, and replaces the file in one
motion, so a reader sees the old file or the new one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inl.errors import RequestError
from inl.executor.tuning_record import Record, dump, parse
from inl.weights.hub import cache_folder

NAME = "tuning.json"
MOST_BYTES = 16 << 20
"""Of a file that is read: each measurement takes a few hundred."""


def tuning_file() -> Path:
    """Where this user's measurements are."""
    return cache_folder() / NAME


def read(path: Path) -> Record:
    """Read a file; an absent one is empty.

    Raises :class:`~inl.errors.RequestError` for one that is damaged, too large, not
    ours or unreadable.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return Record()
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    if len(data) > MOST_BYTES:
        raise RequestError(f"{path}: larger than {MOST_BYTES} bytes: no tuning file")
    return parse(data, str(path))


def write(path: Path, found: Record) -> None:
    """Replace a file in one motion. Raises :class:`~inl.errors.RequestError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(dump(found))
            Path(name).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None


def update(path: Path, change: Callable[[Record], Record]) -> Record:
    """Read, change and replace a file while no other process does.

    A damaged file raises :class:`~inl.errors.RequestError` and stays as it is.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f"{path.name}.lock")):
            found = change(read(path))
            write(path, found)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock; where the system has none, the last writer wins."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

